"""Numerical kernels that both model families use, each with one signature and one implementation per backend."""
