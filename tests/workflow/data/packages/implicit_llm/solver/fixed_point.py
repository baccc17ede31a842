"""Stand-in for what implicit models alone run."""


class FixedPointSolver:
    pass
