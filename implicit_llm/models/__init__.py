"""Define implicit and explicit language models (Mamba2, Llama, families that users register) and an LSTM baseline."""
