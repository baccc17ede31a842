"""Configurations: what a result depends on. The code digest of a job covers this folder."""
