"""The kernels of the `triton` backend that only Llama uses. Imported only where they run."""
