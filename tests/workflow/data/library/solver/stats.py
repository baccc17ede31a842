"""Stand-in for what implicit models alone run."""


class SolverStats:
    pass
