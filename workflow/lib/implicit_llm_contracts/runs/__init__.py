"""Handle a job's identity, manifest, run directory and journal. The code digest does not cover this folder."""
