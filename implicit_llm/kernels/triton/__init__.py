"""The kernels of the `triton` backend are imported only if they run."""
