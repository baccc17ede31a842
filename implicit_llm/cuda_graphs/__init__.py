"""Capture and replay work on a GPU as CUDA graphs: blocks of tokens, whole passes and training steps."""
