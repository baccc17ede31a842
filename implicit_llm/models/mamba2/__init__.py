"""This package holds the Mamba2 family: configuration, layer, model, convolution, scan, and conversion of checkpoints."""
