"""How a job is operated: identity, manifest, run directory, journal. The code digest leaves this folder out."""
