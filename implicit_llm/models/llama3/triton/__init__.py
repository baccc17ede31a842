"""The kernels of the `triton` backend that only Llama uses, imported only if they run."""
