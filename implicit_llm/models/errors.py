"""Errors of the model library."""

from implicit_llm_contracts.runs import UserError


class ModelConfigError(UserError, ValueError):
    """A model cannot be made of a configuration or of weights; the message names the key or the file, and the fix."""
