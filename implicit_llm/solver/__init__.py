"""Fixed-point solvers; nothing here knows what a layer is."""
