"""Define the commands of `implicit-llm`, which import slow modules only when they run."""
