"""What was found in source files, kept from one process to the next, so that an unchanged file is not parsed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.atomic import write_once

# What is found depends on these modules too.
_FINDERS = ("code_digest.py", "project_sources.py")


class SourceCache:
    """Findings by module, each of one content. `path`: where they are kept; None keeps them in this process alone.

    They only save time: a file that cannot be read or written is done without.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._is_changed = False

    def find(self, module: str, content: bytes, what: str, look: Callable[[], Any]) -> Any:
        """What `look` finds, which must be JSON; it is called for what is not known of this content."""
        key, state = f"{module} {what}", hashlib.sha256(self._version + content).hexdigest()
        known = self._known.get(key)
        if known is None or known[0] != state:
            known = self._known[key] = [state, look()]
            self._is_changed = True
        return known[1]

    def save(self) -> None:
        """Write it down, if anything new was found."""
        if self._path is None or not self._is_changed:
            return
        with suppress(OSError):
            write_once(self._path, json.dumps(self._known, sort_keys=True))
        self._is_changed = False

    @cached_property
    def _known(self) -> dict[str, list[Any]]:
        try:
            values = json.loads(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        is_intact = isinstance(values, dict) and all(isinstance(it, list) and len(it) == 2 for it in values.values())
        return values if is_intact else {}

    @cached_property
    def _version(self) -> bytes:
        return b"".join(Path(__file__).with_name(name).read_bytes() for name in _FINDERS)
