"""The kernels of the `triton` backend that only Llama uses are imported only if they run."""
