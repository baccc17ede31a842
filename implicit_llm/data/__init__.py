"""Data sets: how they are made, how they lie on disk, how training and evaluation read them."""
