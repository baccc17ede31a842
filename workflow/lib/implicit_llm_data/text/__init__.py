"""Text corpora: their files, tokenizers, and streams of tokens."""
