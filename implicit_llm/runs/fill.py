"""Fill a tree of frozen dataclasses from plain mappings, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from implicit_llm.runs.errors import UserError

T = TypeVar("T")


class ConfigError(UserError):
    """A key or value of a configuration is wrong; the message names it."""


def fill(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Make a `cls` (a dataclass) from `mapping`; `where` is the file or key the mapping came from.

    Raises: ConfigError for an unknown or missing key, a wrong type or value, or a ValueError of `__post_init__`.
    """
    raise NotImplementedError
