"""Both model families use these kernels. Each kernel has one signature and one implementation per backend."""
