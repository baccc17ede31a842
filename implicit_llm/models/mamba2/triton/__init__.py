"""The kernels of the `triton` backend that only Mamba2 uses are imported only if they run."""
