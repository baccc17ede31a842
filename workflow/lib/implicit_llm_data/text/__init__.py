"""Read text corpora in many files and formats."""
