"""Inspect, accept and delete results; show their states, the reasons for these, and their numbers, lineage and files."""
