"""Turn an experiment into jobs: their graph, identities and code digests, and the states of their results."""
