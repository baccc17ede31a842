"""From an experiment to jobs: the graph, identities, code digests, and what is fresh."""
