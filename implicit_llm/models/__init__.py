"""Define implicit and explicit language models of the Mamba2, Llama and users' families, and an LSTM baseline."""
