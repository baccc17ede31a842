"""Fixed-point solvers, which do not depend on what a layer is."""
