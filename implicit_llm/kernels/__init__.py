"""Both model families use these kernels. Each has one signature and one implementation per backend."""
