"""Numerical kernels of the Mamba2 block, each with one signature and one implementation per backend."""
