"""Stand-in for what models of both families run."""


def solve(tol: float) -> float:
    """Half of it."""
    return tol / 2  # a comment
