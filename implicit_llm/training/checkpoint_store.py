"""The checkpoints of one run: which one to go on from, committing new ones, pruning old ones.

work/checkpoints/step-00001200/    while the phase runs, the last two
work/checkpoint/                   the state at the end of the phase, from which the next one starts
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from implicit_llm.runs.atomic import commit_directory, storage_errors
from implicit_llm.runs.errors import UserError
from implicit_llm.testing import faults
from implicit_llm.tracking.journal import Journal
from implicit_llm.training.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    TornCheckpoint,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)

log = logging.getLogger(__name__)

KEPT = 2
SPACE_FACTOR = 3.2  # two are kept while a third is written, so that pruning never leaves less than one
_PRUNED = ".old.tmp"
_STEP_NAME = re.compile(r"step-(\d{8})")


class ForeignCheckpoint(UserError):
    """A checkpoint belongs to another identity."""


class NoCheckpoint(UserError):
    """There is no usable checkpoint where one was asked for."""


class OutOfSpace(UserError):
    """The file system has less room than the checkpoints of this run need."""

    failure_class = "quota"


class CheckpointStore:
    """Checkpoints below `work` of the run with this identity; only the process that holds the run's lock makes one.

    `last_save_s`: how long the last commit took.
    """

    def __init__(self, work: Path, identity: Mapping[str, Any], journal: Journal) -> None:
        self.directory = work / "checkpoints"
        self.final = work / "checkpoint"
        self.identity = identity
        self.last_save_s: float | None = None
        self._journal = journal
        self._torn: list[Path] = []

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole and right.

        Torn ones are reported and removed after the next commit; damaged ones are set aside as `*.bad`.
        Raises: ForeignCheckpoint when one of another identity was put here.
        """
        self._torn = sorted(self.directory.glob("step-*.tmp"))
        for path in self._torn:
            if not path.name.endswith(_PRUNED):
                self._report("checkpoint_torn", path, "the writer was stopped before the commit")
        for path in self._committed():
            try:
                checkpoint = read_checkpoint(path)
            except TornCheckpoint as error:
                self._torn.append(path)
                self._report("checkpoint_torn", path, str(error))
                continue
            except CorruptCheckpoint as error:
                self._report("checkpoint_corrupt", path, str(error))
                path.rename(_free_name(path.with_name(f"{path.name}.bad")))
                continue
            check_identity(checkpoint, self.identity, advice=f"move {path} away and start again")
            return checkpoint
        return None

    def commit(self, state: TrainingState) -> Checkpoint:
        """Write, rename, then prune to the last two. Raises: StorageError, with all earlier checkpoints intact."""
        started = time.monotonic()
        checkpoint = write_checkpoint(state, self.directory / f"step-{state.global_step:08d}")
        self.last_save_s = time.monotonic() - started
        for path in self._torn:
            if path != checkpoint.path:
                shutil.rmtree(path, ignore_errors=True)
        self._torn = []
        self._prune()
        return checkpoint

    def adopt(self, checkpoint: Checkpoint) -> Checkpoint:
        """Copy a checkpoint of this identity from elsewhere, so that it is one of this run."""
        target = self.directory / f"step-{checkpoint.global_step:08d}"
        tmp = target.with_name(f"{target.name}.tmp")
        shutil.rmtree(tmp, ignore_errors=True)
        with storage_errors(target):
            shutil.copytree(checkpoint.path, tmp)
        commit_directory(tmp, target)
        return read_checkpoint(target)

    def finish(self, checkpoint: Checkpoint) -> Path:
        """Make `checkpoint` the final one and drop the others; again is harmless."""
        if checkpoint.path != self.final:
            faults.point("checkpoint.before_finish")
            commit_directory(checkpoint.path, self.final)
            faults.point("checkpoint.after_finish")
        shutil.rmtree(self.directory, ignore_errors=True)
        return self.final

    def require_space(self, checkpoint_bytes: int) -> None:
        """Raises: OutOfSpace, with the numbers, when the file system cannot take this run's checkpoints."""
        self.directory.mkdir(parents=True, exist_ok=True)
        held = sum(file.stat().st_size for path in self._committed() for file in path.iterdir())
        needed = int(SPACE_FACTOR * checkpoint_bytes) - held
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OutOfSpace(
                f"{self.directory}: checkpoints of {checkpoint_bytes / 2**20:.1f} MiB need {needed / 2**20:.1f} MiB "
                f"more and {free / 2**20:.1f} MiB are free; free some space and start again"
            )

    def _committed(self) -> Iterator[Path]:
        """Directories with the name of a checkpoint, the newest first."""
        if self.final.is_dir():
            yield self.final
        found = [path for path in self.directory.glob("step-*") if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
        yield from sorted(found, reverse=True)

    def _prune(self) -> None:
        whole = [path for path in self._committed() if path != self.final]
        for path in whole[KEPT:]:
            faults.point("checkpoint.before_prune")
            # Renamed first: a half deleted directory must not pass for a damaged checkpoint.
            doomed = path.rename(_free_name(path.with_name(f"{path.name}{_PRUNED}")))
            faults.point("checkpoint.mid_prune")
            shutil.rmtree(doomed, ignore_errors=True)

    def _report(self, event: str, path: Path, why: str) -> None:
        log.warning("%s is left out: %s", path.name, why)
        self._journal.event(event, path=path.name, why=why)


def find_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint `directory` itself, or the newest one of the run directory or work directory `directory`.

    Raises: NoCheckpoint.
    """
    patterns = ("", "checkpoint", "checkpoints/step-*", "work/*/checkpoint", "work/*/checkpoints/step-*")
    paths = [path for pattern in patterns for path in (directory.glob(pattern) if pattern else [directory])]
    found = []
    for path in paths:
        try:
            found.append(read_checkpoint(path))
        except (TornCheckpoint, CorruptCheckpoint, OSError):
            continue
    if not found:
        raise NoCheckpoint(
            f"{directory}: no whole checkpoint there; give the directory of a training run or of a checkpoint"
        )
    return max(found, key=lambda checkpoint: checkpoint.global_step)


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, Any], advice: str) -> None:
    """Raises: ForeignCheckpoint with the difference of the configs, in one line."""
    found = checkpoint.identity
    if found["fingerprint"] == identity["fingerprint"]:
        return
    differences = list(_differences(found["config"], identity["config"], ""))
    what = ", ".join(differences) or "the configs are equal, the code or the inputs are not"
    raise ForeignCheckpoint(
        f"{checkpoint.path}: belongs to another identity, {found['fingerprint'][:16]} and not "
        f"{identity['fingerprint'][:16]}: {what}; {advice}"
    )


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else name)
    elif theirs != ours:
        yield f"{key} {json.dumps(theirs)} there, {json.dumps(ours)} here"


def _free_name(path: Path) -> Path:
    names = (path if number == 0 else path.with_name(f"{path.name}.{number}") for number in range(1000))
    return next(name for name in names if not name.exists())
