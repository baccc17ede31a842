"""Define the identity of a run (everything that its result depends on), its fingerprint, and the JSON for digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import wait_for_files

SHOWN_CHARS = 40  # maximum length of a value in a difference
_ABSENT = object()


class IdentityError(UserError):
    """The text or file of an identity is invalid."""


@dataclass(frozen=True)
class Identity:
    """The settings, code and inputs on which a run's result depends; the name is not part of the fingerprint.

    code: the digest of the code that the job runs.
    """

    stage: str
    name: str
    config: Mapping[str, Any]
    code: str
    upstream: Mapping[str, str]  # role -> fingerprint

    @cached_property
    def fingerprint(self) -> str:
        return compute_fingerprint(self.stage, self.config, self.code, self.upstream)

    def to_json(self, inputs: Mapping[str, str] | None = None) -> str:
        """Return the text for `--identity`, which `read` reads. `inputs`: the run directories of the inputs by role."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return canonical_json(values | {"fingerprint": self.fingerprint} | ({"inputs": inputs} if inputs else {}))

    @classmethod
    def read(cls, text: str) -> tuple[Identity, dict[str, Path]]:
        """Read an identity and the run directories of its inputs by role, from JSON text or from the file after `@`.

        Raises: ConfigError for a wrong key; IdentityError for an unreadable file, a text that is not JSON, a name
            that leads out of the results folder, or a fingerprint that does not match the other values.
        """
        where = "--identity"
        if text.startswith("@"):
            where = text[1:]
            wait_for_files([Path(where)])
            try:
                text = Path(where).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise IdentityError(
                    f"{where}: cannot read the identity ({error}); the workflow writes this file: run it again, also "
                    "when code or configuration were changed while this job waited"
                ) from error
        try:
            values = json.loads(text)
        except ValueError as error:
            raise IdentityError(f"{where}: not JSON ({error}); give JSON text or @FILE") from error
        known = values if isinstance(values, dict) else {}
        given, inputs = known.pop("fingerprint", None), known.pop("inputs", {})
        identity = fill(cls, values, where)
        if not isinstance(inputs, dict):
            raise IdentityError(f"{where}: inputs are no object of folders by role; let the workflow make the identity")
        path = PurePosixPath(identity.stage, identity.name)
        if path.is_absolute() or ".." in path.parts:
            raise IdentityError(f"{where}: stage '{identity.stage}' and name '{identity.name}' lead out of the folder")
        if given != identity.fingerprint:
            raise IdentityError(
                f"{where}: fingerprint {str(given)[:16]} does not belong to the rest, which gives "
                f"{identity.fingerprint[:16]}; do not edit an identity, let the workflow make it"
            )
        return identity, {role: Path(directory) for role, directory in inputs.items()}


def run_and_phase(name: str, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the run (without its seed) and the phase in a training job's name; the phase is None if it is missing."""
    run, _, phase = name.partition("/")
    return run.removesuffix(f"-s{config.get('seed')}"), phase or None


def compute_fingerprint(stage: str, config: Mapping[str, Any], code: str, upstream: Mapping[str, str]) -> str:
    """Return the sha256 (hexadecimal) of the canonical JSON of {stage, config, code, upstream}, without the name."""
    return digest({"stage": stage, "config": config, "code": code, "upstream": upstream})


def canonical_json(value: Any) -> str:
    """Return compact JSON with sorted keys, equal for equal values. Raises: ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return the sha256 (hexadecimal) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def config_differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield a text such as `phase.solver.tol 0.05 -> 0.1` for each difference; "-" means a missing key or entry."""
    if _text(old) == _text(new):
        return
    found: list[str] = []
    if all(isinstance(value, Mapping | list) for value in (old, new)):
        before, after = _entries(old, new), _entries(new, old)
        for key in sorted({*before, *after}, key=str):
            there = before.get(key, _ABSENT), after.get(key, _ABSENT)
            found += config_differences(*there, f"{path}.{key}" if path else str(key))
    yield from found or [f"{path} {_shown(old)} -> {_shown(new)}"]


def _entries(items: Any, others: Any) -> Mapping[Any, Any]:
    """Return the entries of `items` by key (mapping) or by name, else by position (equal lengths), else by content."""
    if isinstance(items, Mapping):
        return items
    if all(isinstance(item, Mapping) and "name" in item for item in (*items, *others)):
        return {item["name"]: item for item in items}
    return dict(enumerate(items)) if len(items) == len(others) else {_text(item): item for item in items}


def _text(value: Any) -> str:
    return "-" if value is _ABSENT else canonical_json(value)


def _shown(value: Any) -> str:
    return shortened(_text(value), SHOWN_CHARS)


def shortened(text: str, length: int) -> str:
    """Return the text; if it is longer than `length`, "..." replaces its end."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
