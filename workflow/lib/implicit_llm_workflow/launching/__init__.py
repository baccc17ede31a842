"""Start and supervise the processes of one job, on one node or several."""
