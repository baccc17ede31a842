"""The identity of a run: what its result depends on, and the fingerprint made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    stage: str
    name: str
    config: dict[str, Any]
    code: str
    upstream: dict[str, str]
    fingerprint: str

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Read the JSON text, or the file named after `@`.

        Raises: IdentityError for a missing or unknown key, or a fingerprint that does not belong to the rest.
        """
        raise NotImplementedError


def compute_fingerprint(stage: str, config: dict[str, Any], code: str, upstream: dict[str, str]) -> str:
    """sha256 (hex) of canonical JSON of {stage, config, code, upstream}; the name is not part of it."""
    raise NotImplementedError
