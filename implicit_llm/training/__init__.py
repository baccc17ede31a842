"""Train one curriculum phase per job; a job resumes bit for bit from its committed checkpoints."""
