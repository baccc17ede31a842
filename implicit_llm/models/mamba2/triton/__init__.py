"""The kernels of the `triton` backend that only Mamba2 uses, imported only if they run."""
