"""Each kind of evaluation has one module, whose function `run` runs its jobs."""
