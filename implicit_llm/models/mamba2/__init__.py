"""The Mamba2 family: configuration, layer and model, loading of checkpoints of others, convolution and scan."""
