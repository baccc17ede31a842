"""Capture of work on a GPU in CUDA graphs, and its replay: blocks of tokens, whole passes, training steps."""
