"""Turn an experiment into jobs: the graph, identities, code digests, and what is fresh."""
