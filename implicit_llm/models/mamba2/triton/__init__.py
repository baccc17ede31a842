"""The kernels of the `triton` backend that only Mamba2 uses. Imported only where they run."""
