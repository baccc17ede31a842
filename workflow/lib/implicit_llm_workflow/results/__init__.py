"""Inspect, accept and delete results: their states, differences, lineage and files, and why they are stale."""
