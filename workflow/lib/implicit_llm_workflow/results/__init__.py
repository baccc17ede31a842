"""Inspect, accept and delete results; show their states, why they are stale, their numbers, lineage and files."""
