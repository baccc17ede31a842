"""Define the Mamba2 family: configuration, layer, model, scan, and conversion from other packages."""
