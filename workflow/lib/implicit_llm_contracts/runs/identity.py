"""The identity of a run: what its result depends on, the fingerprint made of it, and the JSON behind all digests."""

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

SHOWN_CHARS = 40  # of a value in a difference
_ABSENT = object()


class IdentityError(UserError):
    """The text given as identity is not one."""


@dataclass(frozen=True)
class Identity:
    """Everything that a run's result depends on. `code` is the code digest; the name is not part of the fingerprint."""

    stage: str
    name: str
    config: Mapping[str, Any]
    code: str
    upstream: Mapping[str, str]  # role -> fingerprint

    @cached_property
    def fingerprint(self) -> str:
        return compute_fingerprint(self.stage, self.config, self.code, self.upstream)

    def to_json(self, inputs: Mapping[str, str] | None = None) -> str:
        """The text for `--identity`, which `read` reads; `inputs`: the run directories of the inputs, by role."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return canonical_json(values | {"fingerprint": self.fingerprint} | ({"inputs": inputs} if inputs else {}))

    @classmethod
    def read(cls, text: str) -> tuple[Identity, dict[str, Path]]:
        """Read the JSON text, or the file named after `@`: an identity, and the run directories of its inputs by role.

        Raises: ConfigError for a wrong key; IdentityError for a name that leads out of the folder of results, and for a
            fingerprint that does not belong to the rest.
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
    """The run of a job of training, as the experiment names it, without the seed of its config; and the phase."""
    run, _, phase = name.partition("/")
    return run.removesuffix(f"-s{config.get('seed')}"), phase or None


def compute_fingerprint(stage: str, config: Mapping[str, Any], code: str, upstream: Mapping[str, str]) -> str:
    """sha256 (hex) of canonical JSON of {stage, config, code, upstream}; the name is not part of it."""
    return digest({"stage": stage, "config": config, "code": code, "upstream": upstream})


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys: equal values give equal text. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """sha256 (hexadecimal) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def config_differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`phase.solver.tol 0.05 -> 0.1` for each value that differs; "-" stands for a key or entry that is not there."""
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
    """The entries of a list by name if all have one, by place in lists of one length, else by content."""
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
    """The text, with "..." in place of its end where it is longer."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
