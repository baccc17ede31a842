"""Errors of the model library."""


class ModelConfigError(ValueError):
    """A model configuration is inconsistent; the message names the key and the fix."""

    exit_code = 2
