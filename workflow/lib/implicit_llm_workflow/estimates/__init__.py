"""What an experiment costs before it runs: FLOPs, GPU-hours, disk."""
