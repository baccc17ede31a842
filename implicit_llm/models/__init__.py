"""Define implicit and explicit language models of the Mamba2 and Llama families."""
