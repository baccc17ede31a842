"""The kernels of the `triton` backend. Imported only where they run."""
