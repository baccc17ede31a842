"""Driver side of the workflow: configuration, job graph, fingerprints and the command line; imports no torch."""
