"""Run directories: identity, manifest, atomic writes, provenance and the frame in which every stage runs. Standard library only."""
