"""The sub-commands of `implicit-llm`, one module each; what they need is imported when they run."""
