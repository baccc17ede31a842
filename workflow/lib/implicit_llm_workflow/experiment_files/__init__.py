"""Read, validate and complete experiment files and the files that they name."""
