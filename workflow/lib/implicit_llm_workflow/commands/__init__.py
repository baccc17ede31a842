"""The commands of `implicit-llm`, one module each; each imports what it needs when it runs."""
