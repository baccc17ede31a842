"""Start and supervise the processes of one job, and check a machine before its jobs."""
