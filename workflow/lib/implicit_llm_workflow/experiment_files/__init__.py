"""Experiment files and those they name: read, validated, and filled in."""
