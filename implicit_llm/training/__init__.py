"""Training: one curriculum phase a job, on the Hugging Face Trainer, resumed bit for bit from committed checkpoints."""
