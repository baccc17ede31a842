"""Stand-in for the solver."""


def solve(tol: float) -> float:
    """Half of it."""
    return tol / 2  # a comment
