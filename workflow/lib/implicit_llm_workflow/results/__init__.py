"""Looking at results: what is there, how far, in what different, where from, and why stale."""
