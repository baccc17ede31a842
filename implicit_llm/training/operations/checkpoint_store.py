"""The checkpoints of one run: which one to go on from, committing new ones, pruning old ones.

work/checkpoints/step-00001200/    while the phase runs, the last two
work/kept/step-00001000/           at the steps of `phase.keep`, for good: other phases start there
work/checkpoint/                   the state at the end of the phase, from which the next one starts
"""

import json
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from implicit_llm.training.operations.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    TornCheckpoint,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import commit_directory, require_space, retried, storage_errors
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.journal import Journal

log = logging.getLogger(__name__)

ROLLING = 2
SPACE_FACTOR = 3.2  # two stay while a third is written, so that pruning never leaves less than one
KEPT_DIR = "kept"
_PRUNED = ".old.tmp"
_STEP_NAME = re.compile(r"step-\d{8}")
_TORN_NAME = re.compile(r"step-\d{8}(\.old)?\.tmp(\.\d+)?")


class ForeignCheckpoint(UserError):
    """A checkpoint belongs to another identity."""


class NoCheckpoint(UserError):
    """There is no usable checkpoint where one was asked for."""


class CheckpointStore:
    """Checkpoints below `work` of the run with this identity; only the process that holds the run's lock makes one.

    keep: steps whose checkpoints stay. last_save_s: how long the last commit took.
    """

    def __init__(self, work: Path, identity: Mapping[str, Any], journal: Journal, keep: Sequence[int] = ()) -> None:
        self.directory = work / "checkpoints"
        self.kept = work / KEPT_DIR
        self.final = work / "checkpoint"
        self.identity = identity
        self.keep = tuple(keep)
        self.last_save_s = 0.0
        self._journal = journal
        self._torn: list[Path] = []
        self._whole_kept: set[int] = set()

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole and right, with all kept ones before it.

        Torn ones are reported and removed after the next commit; damaged ones are set aside as `*.bad`. Where a kept
        one was lost, those after it are given up: training goes back and makes it again.
        Raises: ForeignCheckpoint when one of another identity was put here.
        """
        found_names = [*self.directory.glob("step-*.tmp*"), *self.kept.glob("step-*.tmp*")]
        self._torn = sorted(path for path in found_names if _TORN_NAME.fullmatch(path.name))
        for path in self._torn:
            if _PRUNED not in path.name:
                self._report("checkpoint_torn", path, "the writer was stopped before the commit")
        kept = {step: found for step in self.keep if (found := self._read(self.kept / step_name(step))) is not None}
        self._whole_kept = set(kept)
        first_lost = min(set(self.keep) - set(kept), default=None)
        usable = [kept[step] for step in kept if first_lost is None or step < first_lost][-1:]
        for path in self._committed():
            checkpoint = self._read(path)
            if checkpoint is None:
                continue
            if first_lost is not None and first_lost <= checkpoint.global_step:
                self._give_up(checkpoint, first_lost)
                continue
            usable.append(checkpoint)
            break
        return max(usable, key=lambda checkpoint: checkpoint.global_step, default=None)

    def commit(self, state: TrainingState) -> None:
        """Write, rename, then prune to the last two; errors that may pass are given some seconds.

        Raises: StorageError, with all earlier checkpoints intact.
        """
        if state.global_step in self._whole_kept:  # only an earlier one was lost; who started from this one keeps it
            return
        started = time.monotonic()
        directory = self.kept if state.global_step in self.keep else self.directory
        path = directory / step_name(state.global_step)
        retried(lambda: write_checkpoint(state, path), path)
        self.last_save_s = time.monotonic() - started
        for torn in self._torn:
            if torn != path:
                faults.point("checkpoint.before_removal")
                shutil.rmtree(torn, ignore_errors=True)
        self._torn = []
        self._prune()

    def adopt(self, checkpoint: Checkpoint) -> Checkpoint:
        """Copy a checkpoint of this identity from elsewhere, with the kept ones before it, so that it is of this run.

        Raises: NoCheckpoint when a kept one is not there.
        """
        for step in self.keep:
            if step < checkpoint.global_step and not (self.kept / step_name(step)).is_dir():
                parents = checkpoint.path.parent, checkpoint.path.parent.parent
                places = [parent / KEPT_DIR / step_name(step) for parent in parents]
                source = next((place for place in places if place.is_dir()), None)
                if source is None:
                    raise NoCheckpoint(
                        f"{checkpoint.path}: the kept checkpoint of step {step} is not beside it ({places[0]}); give "
                        f"the whole run directory, or a checkpoint up to step {step}"
                    )
                _copy(source, self.kept / step_name(step))
        directory = self.kept if checkpoint.global_step in self.keep else self.directory
        return _copy(checkpoint.path, directory / step_name(checkpoint.global_step))

    def finish(self, checkpoint: Checkpoint) -> None:
        """Make `checkpoint` the final one and drop all but the kept ones; again is harmless."""
        if checkpoint.path != self.final:
            faults.point("checkpoint.before_finish")
            if checkpoint.path.parent == self.kept:
                _copy(checkpoint.path, self.final)
            else:
                commit_directory(checkpoint.path, self.final)
            faults.point("checkpoint.after_finish")
        shutil.rmtree(self.directory, ignore_errors=True)

    def require_space(self, checkpoint_bytes: int) -> None:
        """Raises: StorageError, with the numbers, when the file system cannot take this run's checkpoints."""
        there = [*self._committed(), *(path for step in self.keep if (path := self.kept / step_name(step)).is_dir())]
        held = sum(file.stat().st_size for path in there for file in path.iterdir())
        needed = int((SPACE_FACTOR + len(self.keep)) * checkpoint_bytes) - held
        kept = f", {len(self.keep)} of them kept," if self.keep else ""
        require_space(self.directory, needed, f"checkpoints of {checkpoint_bytes / 2**20:.1f} MiB{kept}")

    def _read(self, path: Path) -> Checkpoint | None:
        """The checkpoint at `path` if it is whole and right, with a report if it is there and is not."""
        if not path.is_dir():
            return None
        try:
            checkpoint = read_checkpoint(path)
        except TornCheckpoint as error:
            self._torn.append(path)
            self._report("checkpoint_torn", path, str(error))
            return None
        except CorruptCheckpoint as error:
            self._report("checkpoint_corrupt", path, str(error))
            faults.point("checkpoint.before_quarantine")
            path.rename(_free_name(path.with_name(f"{path.name}.bad")))
            return None
        check_identity(checkpoint, self.identity, advice=f"move {path} away and start again")
        return checkpoint

    def _committed(self) -> Iterator[Path]:
        """Directories with the name of a checkpoint, the newest first, without the kept ones."""
        if self.final.is_dir():
            yield self.final
        found = [path for path in self.directory.glob("step-*") if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
        yield from sorted(found, reverse=True)

    def _prune(self) -> None:
        whole = [path for path in self._committed() if path != self.final]
        for path in whole[ROLLING:]:
            faults.point("checkpoint.before_prune")
            # Renamed first: a half deleted directory must not pass for a damaged checkpoint.
            doomed = path.rename(_free_name(path.with_name(f"{path.name}{_PRUNED}")))
            faults.point("checkpoint.mid_prune")
            shutil.rmtree(doomed, ignore_errors=True)

    def _give_up(self, checkpoint: Checkpoint, lost_step: int) -> None:
        """Move a checkpoint that stands after a lost one out of the way, until the next commit."""
        self._report(
            "kept_checkpoint_lost",
            checkpoint.path,
            f"the kept checkpoint of step {lost_step}, before it, was lost and is made again",
        )
        faults.point("checkpoint.before_give_up")
        self.directory.mkdir(parents=True, exist_ok=True)
        aside = self.directory / f"{step_name(checkpoint.global_step)}{_PRUNED}"
        self._torn.append(checkpoint.path.rename(_free_name(aside)))

    def _report(self, event: str, path: Path, why: str) -> None:
        log.warning("%s is left out: %s", path.name, why)
        self._journal.event(event, path=path.name, why=why)


def step_name(step: int) -> str:
    """Name of the directory of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def find_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint `directory` itself, or the newest one of the run directory or work directory `directory`.

    Raises: NoCheckpoint.
    """
    below = ("checkpoint", "checkpoints/step-*", f"{KEPT_DIR}/step-*")
    patterns = ("", *below, *(f"work/*/{pattern}" for pattern in below))
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
    found = checkpoint.state["identity"]
    if found["fingerprint"] == identity["fingerprint"]:
        return
    differences = list(_differences(found["config"], identity["config"], ""))
    what = ", ".join(differences) or "the configs are equal, the code or the inputs are not"
    raise ForeignCheckpoint(
        f"{checkpoint.path}: belongs to another identity, {found['fingerprint'][:16]} and not "
        f"{identity['fingerprint'][:16]}: {what}; {advice}"
    )


def _copy(source: Path, target: Path) -> Checkpoint:
    """Copy a checkpoint to another place, where it appears whole."""
    tmp = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    with storage_errors(target, sum(file.stat().st_size for file in source.iterdir())):
        faults.point("checkpoint.before_copy")
        shutil.copytree(source, tmp)
    faults.point("checkpoint.after_copy")
    commit_directory(tmp, target)
    return read_checkpoint(target)


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else name)
    elif theirs != ours:
        yield f"{key} {json.dumps(theirs)} there, {json.dumps(ours)} here"


def _free_name(path: Path) -> Path:
    names = (path if number == 0 else path.with_name(f"{path.name}.{number}") for number in range(1000))
    return next(name for name in names if not name.exists())
