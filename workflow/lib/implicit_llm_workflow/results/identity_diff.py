"""In what the identities of several results differ: settings, code, and the same of what they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from implicit_llm_contracts.runs.identity import Identity, canonical_json
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow.planning.code_record import changed_files, read_code_record
from implicit_llm_workflow.results.compared_runs import Compared, Subject
from implicit_llm_workflow.results.shown_numbers import MISSING

CODE, STAGE = "code", "stage"
CODE_DIGITS = 12
_ABSENT = object()


@dataclass(frozen=True)
class DifferentSetting:
    """`where`: of the result itself (""), or of which inputs by role, such as "start.data"; `values`: a text for each
    column, those of several seeds together; `detail`: of code what changed, where that was recorded.
    """

    setting: str
    where: tuple[str, ...]
    values: tuple[str, ...]
    detail: str = ""

    @property
    def shown(self) -> str:
        """ "phase.solver.tol", or "data: group"; a difference that inputs share is said once."""
        first, *others = self.where
        name = f"{first}: {self.setting}" if first else self.setting
        return f"{name} (and of {', '.join(others)})" if others else name


def differences(columns: Sequence[Compared]) -> list[DifferentSetting]:
    """What differs, and nothing that is equal; inputs only as far as they differ themselves."""
    found: dict[tuple[str, tuple[str, ...]], DifferentSetting] = {}
    for row in _Walk(columns).rows("", [member.identity for column in columns for member in column.members]):
        known = found.get((row.setting, row.values))
        found[row.setting, row.values] = row if known is None else replace(known, where=(*known.where, *row.where))
    return list(found.values())


def equal_settings(columns: Sequence[Compared]) -> int:
    """How many settings of the results themselves are equal."""
    configs = [dict(_leaves(member.identity.config)) for column in columns for member in column.members]
    return sum(all(config.get(path, _ABSENT) == value for config in configs) for path, value in configs[0].items())


class _Walk:
    """Over the identities of all members of all columns at once, from the results to what they were made from."""

    def __init__(self, columns: Sequence[Compared]) -> None:
        self._columns = columns
        self._members: list[Subject] = [member for column in columns for member in column.members]
        self._seen: set[tuple[str | None, ...]] = set()

    def rows(self, where: str, identities: Sequence[Identity]) -> Iterator[DifferentSetting]:
        fingerprints = tuple(identity.fingerprint for identity in identities)
        if len(set(fingerprints)) == 1 or fingerprints in self._seen:
            return
        self._seen.add(fingerprints)
        yield from self._different(where, STAGE, [identity.stage for identity in identities])
        leaves = [dict(_leaves(identity.config)) for identity in identities]
        paths = dict.fromkeys(path for item in leaves for path in item)
        tables = {path.rpartition(".")[0] for path in paths}
        for path in (path for path in paths if path not in tables):  # "phase.solver" of null beside "phase.solver.tol"
            yield from self._different(where, path, [item.get(path, MISSING) for item in leaves])
        yield from self._code(where, identities)
        for role in dict.fromkeys(role for identity in identities for role in identity.upstream):
            yield from self._input(where, role, [identity.upstream.get(role) for identity in identities])

    def _code(self, where: str, identities: Sequence[Identity]) -> Iterator[DifferentSetting]:
        if len({identity.stage for identity in identities}) > 1:
            return
        for row in self._different(where, CODE, [identity.code[:CODE_DIGITS] for identity in identities]):
            first = identities[0]
            other = next(identity for identity in identities if identity.code != first.code)
            yield replace(row, detail=self._changes(first.code, other.code))

    def _changes(self, old: str, new: str) -> str:
        """What differs between two digests, where the code behind both was recorded."""
        records = []
        for digest in (old, new):
            roots = dict.fromkeys(member.results.root for member in self._members)
            records.append(next(filter(None, (read_code_record(root, digest) for root in roots)), None))
        before, after = records
        return ", ".join(map(str, changed_files(before, after))) if before and after else "what changed is not recorded"

    def _input(self, where: str, role: str, fingerprints: Sequence[str | None]) -> Iterator[DifferentSetting]:
        if len(set(fingerprints)) == 1:
            return
        found = [
            None if fingerprint is None else member.results.identity(fingerprint, member.run_dir)
            for member, fingerprint in zip(self._members, fingerprints, strict=True)
        ]
        path = f"{where}.{role}" if where else role
        known = [identity for identity in found if identity is not None]
        if len(known) == len(found):
            yield from self.rows(path, known)
            return
        texts = [
            MISSING
            if fingerprint is None
            else f"{identity.stage}/{identity.name}"
            if identity is not None
            else f"not found ({fingerprint[:FINGERPRINT_DIGITS]})"
            for identity, fingerprint in zip(found, fingerprints, strict=True)
        ]
        yield from self._different(where, f"input {role}", texts)

    def _different(self, where: str, setting: str, texts: Sequence[str]) -> Iterator[DifferentSetting]:
        """A row, if the texts, one for each member, are not all equal."""
        if len(set(texts)) == 1:
            return
        rest, values = list(texts), []
        for column in self._columns:
            mine, rest = rest[: len(column.members)], rest[len(column.members) :]
            values.append(", ".join(dict.fromkeys(mine)))
        if setting != "seed" or len(set(values)) > 1:  # seeds within a column stand above it
            yield DifferentSetting(setting, (where,), tuple(values))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Values that are no tables, as text, by their keys."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else canonical_json(value)
