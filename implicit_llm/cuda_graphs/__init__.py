"""The capture and replay of CUDA graphs: for blocks of tokens, for whole passes and for training steps."""
