"""Train one curriculum phase per job, which resumes bit for bit from committed checkpoints."""
