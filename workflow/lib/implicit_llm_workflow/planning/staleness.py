"""Compare wanted and recorded results: report which are missing, stale or fresh, and why.

A result is fresh if its manifest is where the rule declares it, in the work folder of the wanted fingerprint. Snakemake
applies the same test and runs the jobs without a fresh result; this module adds the reason. If somebody deletes the
copy of the manifest in the run directory, the result counts as missing, so its job checks the files of the result
again. The driver replaces a damaged copy.

A result whose larger files were deleted to free the disk is fresh too, until a job that will run reads these files.

If a user accepts a result although its code changed, the manifest stays as it is, and an `accepted.json` is beside it:

    {"recorded": "<fingerprint of the manifest>", "wanted": "<fingerprint wanted instead>",
     "recorded_code": "<sha256>", "wanted_code": "<sha256>", "changed": ["module (function)"] or null,
     "when": "2026-11-21T22:00:00+00:00", "why": "..."}

An acceptance is valid for its pair of fingerprints only. It ends with another change of code, config or input, and with
the loss of the manifest. While it is valid, the job's identity is the recorded one and the declared output is that of
the older result, so Snakemake and the jobs that depend on the result see no change.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.runs.identity import Identity, config_differences
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import (
    AGAIN,
    COMMIT,
    DECLARED,
    FREED,
    committed,
    find_committed,
    work_directory,
)
from implicit_llm_workflow.node import Node

ACCEPTED = "accepted.json"


class AcceptedUnreadable(UserError):
    """A file `accepted.json` could not be read as an acceptance."""


@dataclass(frozen=True)
class Acceptance:
    """The content of `accepted.json`; `changed` lists the changed code and is None if the old code was not recorded."""

    recorded: str
    wanted: str
    recorded_code: str
    wanted_code: str
    changed: tuple[str, ...] | None
    when: str
    why: str


def read_acceptance(run_dir: Path) -> Acceptance | None:
    """Return the acceptance in a run directory; None if there is none or it was revoked. Raises: AcceptedUnreadable."""
    path = run_dir / ACCEPTED
    try:
        return fill(Acceptance, json.loads(path.read_bytes()), "accepted")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        is_denied = isinstance(error, PermissionError)
        advice = f"ask its owner to let you read {run_dir}" if is_denied else "check the file system"
        raise AcceptedUnreadable(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, ConfigError) as error:
        raise AcceptedUnreadable(f"{path}: is no accepted exception ({error}); delete the file to revoke it") from error


def find_acceptance(run_dir: Path, wanted: Identity) -> Acceptance | None:
    """Return the acceptance in a run directory if it is valid, else None. Raises: AcceptedUnreadable.

    A valid acceptance names the fingerprint of `wanted`, and the accepted result differs from `wanted` in its code
    alone. This result and the manifest of the run directory must exist.
    """
    found = read_acceptance(run_dir)
    if found is None or found.wanted != wanted.fingerprint or with_code_of(found, wanted) is None:
        return None
    recorded = find_committed(work_directory(run_dir, found.recorded))
    is_there = recorded is not None and recorded.fingerprint == found.recorded and (run_dir / MANIFEST).exists()
    return found if is_there else None


def with_code_of(acceptance: Acceptance, wanted: Identity) -> Identity | None:
    """Return the accepted identity, or None if it differs from the wanted one in more than the code."""
    identity = replace(wanted, code=acceptance.recorded_code)
    return identity if identity.fingerprint == acceptance.recorded else None


LOST = "its manifest was deleted"
SHOWN_DIFFERENCES = 3
EXCERPT = "excerpt"
PAGES = ("report", EXCERPT)  # stages that read only the small files of a result, which are never freed
_SMALL = (".json", ".jsonl")


@dataclass(frozen=True)
class Difference:
    """The difference between a recorded and a wanted identity.

    `config`: a text for each setting that differs. `code`: the recorded and the wanted digest, or None if they are
    equal. `changed_inputs` and `new_inputs` are keys of nodes; `removed_inputs` are the roles of inputs that are no
    longer used.
    """

    stage: str
    config: tuple[str, ...]
    code: tuple[str, str] | None
    changed_inputs: tuple[str, ...]
    new_inputs: tuple[str, ...]
    removed_inputs: tuple[str, ...]

    def reasons(self) -> Iterator[str]:
        """Yield one reason for each kind of change."""
        # The key `jobs` in the config of a page describes its inputs, so it changes together with the inputs.
        inputs = (*self.changed_inputs, *self.new_inputs, *self.removed_inputs)
        own = [change for change in self.config if not (inputs and change.startswith("jobs."))]
        if own:
            yield f"config: {_first(own)}"
        if self.code is not None:
            yield f"the code of stage {self.stage} changed"
        for what, names in (
            ("input changed", self.changed_inputs),
            ("new input", self.new_inputs),
            ("input no longer used", self.removed_inputs),
        ):
            if names:
                yield f"{what}: {_first(names)}"


def _first(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_DIFFERENCES
    return f"{', '.join(names[:SHOWN_DIFFERENCES])}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True)
class Status:
    """The status of a job's result. `why`: the reason for the state; empty for a fresh result that was not accepted.

    `recorded`: the manifest of the wanted result, or else of the result that the run directory shows; None if this
    manifest is missing or damaged. `difference`: how `recorded` differs from the wanted identity; None if the wanted
    result exists or `recorded` is None. `accepted`: the acceptance on which a fresh result relies. `is_declared`:
    whether the declared manifest exists, which a freed result does not have.
    """

    state: Literal["fresh", "stale", "missing"]
    why: str
    recorded: Manifest | None
    difference: Difference | None = None
    accepted: Acceptance | None = None
    is_declared: bool = True

    @property
    def is_freed(self) -> bool:
        return self.state == "fresh" and not self.is_declared

    @property
    def is_looked_at(self) -> bool:
        """Whether the job runs although its declared manifest exists."""
        return self.state != "fresh" and self.is_declared


FORCED = "forced, or made from what was forced"


def status_of(run_dir: Path, wanted: Identity, node: Node, accepted: Acceptance | None) -> Status:
    """Return the status of a node's result; `wanted` is the accepted identity if there is an acceptance."""
    if not run_dir.exists():  # a shortcut for the thousands of jobs before the first run
        return Status("missing", "never finished", None, is_declared=False)
    work, shown = work_directory(run_dir, wanted.fingerprint), run_dir / MANIFEST
    path, is_declared = committed(work), (work / MANIFEST).exists()
    try:
        recorded = Manifest.read(path or shown)
    except ManifestError as error:
        if error.path.exists():
            return Status("stale", str(error), None, is_declared=is_declared)
        return Status("missing", "never finished", None, is_declared=is_declared)
    if path is None:
        difference = difference_of(recorded, wanted, node)
        return Status("stale", "; ".join(difference.reasons()) or LOST, recorded, difference, is_declared=False)
    if (work / AGAIN).exists():
        return Status("stale", FORCED, recorded, is_declared=is_declared)
    if (work / FREED).exists() or (is_declared and shown.exists()):
        why = f"the code changed, accepted: {accepted.why}" if accepted is not None else ""
        return Status("fresh", why, recorded, accepted=accepted, is_declared=is_declared)
    return Status("missing", LOST, recorded, is_declared=is_declared)


def difference_of(recorded: Manifest, wanted: Identity, node: Node) -> Difference:
    """Return the parts in which the two identities differ."""
    return Difference(
        stage=wanted.stage,
        config=tuple(config_differences(recorded.config, wanted.config)),
        code=(recorded.code, wanted.code) if recorded.code != wanted.code else None,
        changed_inputs=tuple(
            node.upstream[role]
            for role, fingerprint in wanted.upstream.items()
            if recorded.upstream.get(role, fingerprint) != fingerprint
        ),
        new_inputs=tuple(node.upstream[role] for role in wanted.upstream if role not in recorded.upstream),
        removed_inputs=tuple(role for role in recorded.upstream if role not in wanted.upstream),
    )


def payload(work: Path) -> list[Path]:
    """Return the files of a result that can be freed, such as models, shards and checkpoints.

    Declared files are kept, and so are the files directly in `work` that are hidden, .json, .jsonl or a mark.
    """
    small = {path.name for path in work.glob("*") if path.suffix in _SMALL or path.name.startswith(".")}
    kept = small | {DECLARED, FREED, AGAIN}
    return sorted(path for path in work.rglob("*") if path.is_file() and path.relative_to(work).parts[0] not in kept)


def remove_declared(work: Path) -> None:
    """Remove the declared manifest, at whose absence Snakemake runs the job; the result itself remains committed.

    The file is renamed, because a result of an older version has no COMMIT; in other results both files are equal.
    """
    with suppress(FileNotFoundError):
        (work / MANIFEST).replace(work / COMMIT)


def readers(nodes: Mapping[str, Node], key: str) -> list[str]:
    """Return the keys of the jobs that read the larger files of the job `key`.

    For a shard these include the readers of its streams, because a stream may point to the files of the shard.
    """
    direct = [name for name, node in nodes.items() if key in node.upstream.values() and node.stage not in PAGES]
    streams = direct if nodes[key].config.get("kind") == "token_shard" else []
    return [*direct, *(name for stream in streams for name in readers(nodes, stream))]


def needed_again(nodes: Mapping[str, Node], statuses: Mapping[str, Status]) -> dict[str, Status]:
    """Return the same statuses, except that a freed result is stale if a job that will run reads its files."""
    found = dict(statuses)
    for key in reversed(list(nodes)):  # a node comes after its inputs
        node = nodes[key]
        if found[key].state == "fresh" or node.stage in PAGES:
            continue
        for name in node.upstream.values():
            if found[name].is_freed:
                found[name] = replace(found[name], state="stale", why=f"its files were freed, and {key} needs them")
    return found


def pointed_to(nodes: Mapping[str, Node], key: str) -> list[str]:
    """Return the keys of a job's inputs that are shards; a stream of the whole training split points to their files."""
    return [name for name in nodes[key].upstream.values() if nodes[name].config.get("kind") == "token_shard"]
