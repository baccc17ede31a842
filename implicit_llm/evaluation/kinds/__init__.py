"""One module for each kind of evaluation: `run` is the body of its jobs."""
