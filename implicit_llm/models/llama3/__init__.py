"""The Llama family: configuration, layer and model, loading of checkpoints of others, attention."""
