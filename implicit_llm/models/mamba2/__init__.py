"""The Mamba2 family: configuration, layer and model, conversion of other packages' models, convolution and scan."""
