"""Inspect results: their states, differences, lineage, files and the reasons why they are stale."""
