"""The kernels of the `triton` backend, imported only if they run."""
