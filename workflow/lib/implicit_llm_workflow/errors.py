"""Errors that a user can cause and cure; the console shows them as one line and ends with `exit_code`."""

from __future__ import annotations


class UserError(Exception):
    """What is wrong, where (file and key), what to do next, in one line."""

    exit_code = 2


class ConfigError(UserError):
    """A config file, or a value in it, is not valid."""
