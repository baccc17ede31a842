"""Define the `triton` kernels that only Mamba2 uses; they are imported only if they run."""
