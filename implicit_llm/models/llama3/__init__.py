"""The Llama family: configuration, layer and model, conversion of other packages' models, attention."""
