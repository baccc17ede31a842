"""Define the `triton` kernels that only Llama uses; they are imported only if they run."""
