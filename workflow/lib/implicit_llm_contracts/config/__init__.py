"""Define the configurations on which a result depends. The code digest of a job covers this folder."""
