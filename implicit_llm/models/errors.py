"""Errors of the model library."""


class ModelConfigError(ValueError):
    """A model cannot be made of a configuration or of weights; the message names the key or the file, and the fix."""

    exit_code = 2
    failure_class = "user"
