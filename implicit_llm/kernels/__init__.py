"""Provide the kernels that both model families use, each with one signature for all backends; select the backend."""
