"""These fixed-point solvers do not depend on what a layer is."""
