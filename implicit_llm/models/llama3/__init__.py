"""Define the Llama family: configuration, layer, model, attention, and conversion from other packages."""
