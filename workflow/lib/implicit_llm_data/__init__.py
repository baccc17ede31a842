"""Data sets: how they are made, their format on disk, how training and evaluation read them. Imports no torch."""
