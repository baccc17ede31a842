"""Training: one curriculum phase a job, resumed bit for bit from committed checkpoints."""
