"""Plan, start and inspect the jobs of an experiment, and define the command line; the import loads no torch."""
