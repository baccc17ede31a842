"""Find the checkpoint from which a run resumes, commit new checkpoints and delete old ones.

work/checkpoints/step-00001200/    while the phase runs, the last two
work/kept/step-00001000/           at the steps of `phase.keep`, permanently: other phases start from them
work/checkpoint/                   the state at the end of the phase, from which the next phase starts

Each checkpoint is a directory that gets its name when it is complete, with digests of its files. Nothing is pickled.

model.safetensors        parameters and persistent buffers
optimizer.safetensors    "<parameter>.<exp_avg, exp_avg_sq, step>"
random.safetensors       "<rank>.<torch, cuda>", uint8
state.json               global_step, identity, random states of Python and numpy, gradient scale, metrics
checkpoint.json          size and sha256 of each file above, written last
"""

import json
import logging
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import ConfigError, UserError, refuse_if
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import commit_directory, new_directory, require_space, retried, temporary_name
from implicit_llm_contracts.runs.identity import config_differences
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import FileRecord

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
STATE, DIGESTS = "state.json", "checkpoint.json"
_FILES = (MODEL, OPTIMIZER, RANDOM, STATE)
ROLLING = 2
SPACE_FACTOR = 3.2  # the needed space, in checkpoints: two exist while a third is written, and there is a margin
KEPT_DIR = "kept"
_STEP_NAME = re.compile(r"step-\d{8}")


class CorruptCheckpoint(Exception):
    """A file of a committed checkpoint is missing, or differs from the file that was written."""


@dataclass(frozen=True)
class TrainingState:
    """The content of a checkpoint; `random` has one (values, tensors) for each rank.

    identity: {"stage", "fingerprint", "config"} of the run. metrics: see StepMetrics.state. scaler: the state of the
    gradient scaler, or None without one.
    """

    global_step: int
    identity: Mapping[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Sequence[tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    metrics: Mapping[str, Any]
    scaler: Mapping[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the tensors of model and optimizer, in bytes."""
        return sum(tensor.nbytes for tensors in (self.model, self.optimizer) for tensor in tensors.values())


class Staging:
    """Host memory for a copy of a training state, so that training continues while the copy is written.

    The memory is pinned for a GPU, which makes copies several times as fast. It is one block, because pinned blocks are
    rounded up to powers of two. Each copy overwrites the previous one.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, state: TrainingState) -> TrainingState:
        """Return `state` with its model and optimizer tensors replaced by their copies in this memory."""
        tensors = [*state.model.values(), *state.optimizer.values()]
        sizes = [-(-tensor.nbytes // 8) * 8 for tensor in tensors]  # each aligned to 8 bytes
        if len(self._memory) != sum(sizes):
            is_pinned = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
        copies = [
            place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            for place, tensor in zip(self._memory.split(sizes), tensors, strict=True)
        ]
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        model = dict(zip(state.model, copies, strict=False))
        optimizer = dict(zip(state.optimizer, copies[len(model) :], strict=True))
        return replace(state, model=model, optimizer=optimizer)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose digests were correct when it was read.

    state: the content of state.json: global_step, identity, metrics, scaler, and `random` without its tensors.
    """

    path: Path
    state: Mapping[str, Any]

    @property
    def global_step(self) -> int:
        return int(self.state["global_step"])

    def model(self) -> dict[str, Tensor]:
        return load_file(self.path / MODEL)

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.path / OPTIMIZER)

    def random(self, rank: int) -> tuple[Mapping[str, Any], dict[str, Tensor]] | None:
        """Return the random states of a rank, or None if the checkpoint has none for this rank."""
        if rank >= len(self.state["random"]):
            return None
        prefix, found = f"{rank}.", load_file(self.path / RANDOM)
        own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        return self.state["random"][rank], own


def write_checkpoint(state: TrainingState, final_dir: Path) -> None:
    """Write the checkpoint beside `final_dir`, then commit it by a rename.

    Raises: StorageError for a full or unwritable disk; the partial checkpoint is then deleted.
    """
    random = {f"{rank}.{name}": tensor for rank, (_, part) in enumerate(state.random) for name, tensor in part.items()}
    values = {
        "global_step": state.global_step,
        "identity": state.identity,
        "random": [values for values, _ in state.random],
        "metrics": state.metrics,
        "scaler": state.scaler,
    }
    with new_directory(final_dir, state.num_bytes) as directory, _safetensors_errors(final_dir):
        _save(state.model, directory / MODEL)
        faults.point("checkpoint.after_model")
        _save(state.optimizer, directory / OPTIMIZER)
        _save(random, directory / RANDOM)
        _write_json(values, directory / STATE)
        faults.point("checkpoint.before_digests")
        files = tuple(FileRecord.of(directory / name, directory) for name in _FILES)
        _write_json(asdict(_Digests(state.global_step, files)), directory / DIGESTS)
    faults.point("checkpoint.after_commit")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every digest.

    Raises: CorruptCheckpoint, which names the first bad file and what differs.
    """
    try:
        digests = fill(_Digests, json.loads((path / DIGESTS).read_bytes()), DIGESTS)
    except (OSError, ValueError, ConfigError) as error:
        raise CorruptCheckpoint(f"{path / DIGESTS}: missing or damaged ({error})") from error
    for record in digests.files:
        if difference := record.difference(path / record.path):
            raise CorruptCheckpoint(f"{path / record.path}: {difference}")
    return Checkpoint(path, json.loads((path / STATE).read_bytes()))


@dataclass(frozen=True)
class _Digests:
    """The content of checkpoint.json."""

    global_step: int
    files: tuple[FileRecord, ...]
    format: Literal[3] = 3

    def __post_init__(self) -> None:
        refuse_if([record.path for record in self.files] != list(_FILES), "files: others are listed")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    faults.point("checkpoint.before_file")
    # There is no metadata, because safetensors would write several keys in random order and so change the digest.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _write_json(values: Mapping[str, Any], path: Path) -> None:
    faults.point("checkpoint.before_values")
    path.write_text(json.dumps(values, sort_keys=True, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """Replace a SafetensorError that the system caused, for example by a full disk, by an OSError."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(path)) from error


class ForeignCheckpoint(UserError):
    """A checkpoint belongs to a run with another identity."""


class CheckpointStore:
    """The checkpoints below `work` of the run with this identity; only rank 0, which has the run's lock, uses them.

    keep: the steps whose checkpoints are stored permanently. last_save_s: how many seconds the last commit took.
    """

    def __init__(self, work: Path, identity: Mapping[str, Any], journal: Journal, keep: Sequence[int] = ()) -> None:
        self.directory = work / "checkpoints"
        self.kept = work / KEPT_DIR
        self.final = work / "checkpoint"
        self.identity = identity
        self.keep = tuple(keep)
        self.last_save_s = 0.0
        self._journal = journal
        self._whole_kept: set[int] = set()

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint from which training can resume, or None.

        Damaged checkpoints are renamed to `*.bad`. If a checkpoint at a step of `keep` was lost, training must resume
        before this step to write it again. Later checkpoints are then renamed too, except intact ones at steps of
        `keep`, because other phases may start from them.
        Raises: ForeignCheckpoint if a checkpoint has another identity.
        """
        kept = {step: found for step in self.keep if (found := self._read(self.kept / step_name(step))) is not None}
        self._whole_kept = set(kept)
        first_lost = min(set(self.keep) - set(kept), default=math.inf)
        usable = [kept[step] for step in kept if step < first_lost][-1:]
        for path in self._committed():
            checkpoint = self._read(path)
            if checkpoint is None:
                continue
            if first_lost <= checkpoint.global_step:
                why = f"the kept checkpoint of step {first_lost}, before it, was lost and is made again"
                self._set_aside("kept_checkpoint_lost", path, why)
                continue
            usable.append(checkpoint)
            break
        return max(usable, key=lambda checkpoint: checkpoint.global_step, default=None)

    def commit(self, state: TrainingState) -> None:
        """Write a checkpoint, then delete those in work/checkpoints except the last two.

        Transient errors are retried for a few seconds. If `newest` has found an intact checkpoint of this step in
        work/kept, nothing happens. Raises: StorageError, with all earlier checkpoints intact.
        """
        if state.global_step in self._whole_kept:  # it is intact, and later phases may have started from it
            return
        started = time.monotonic()
        directory = self.kept if state.global_step in self.keep else self.directory
        path = directory / step_name(state.global_step)
        retried(lambda: write_checkpoint(state, path), path)
        self.last_save_s = time.monotonic() - started
        for old in [path for path in self._committed() if path != self.final][ROLLING:]:
            faults.point("checkpoint.before_prune")
            # Rename first: a half-deleted directory must not look like a damaged checkpoint.
            doomed = old.rename(temporary_name(old))
            faults.point("checkpoint.mid_prune")
            shutil.rmtree(doomed, ignore_errors=True)

    def finish(self, checkpoint: Checkpoint) -> None:
        """Make `checkpoint` the final one and delete all others except those in work/kept; you can repeat the call.

        Raises: StorageError; CorruptCheckpoint if the copy of a kept checkpoint is damaged.
        """
        if checkpoint.path != self.final:
            faults.point("checkpoint.before_finish")
            if checkpoint.path.parent == self.kept:
                num_bytes = sum(file.stat().st_size for file in checkpoint.path.iterdir())
                with new_directory(self.final, num_bytes) as directory:
                    faults.point("checkpoint.before_copy")
                    shutil.copytree(checkpoint.path, directory, dirs_exist_ok=True)
                faults.point("checkpoint.after_copy")
                read_checkpoint(self.final)
            else:
                commit_directory(checkpoint.path, self.final)
            faults.point("checkpoint.after_finish")
        shutil.rmtree(self.directory, ignore_errors=True)

    def require_space(self, checkpoint_bytes: int) -> None:
        """Raise StorageError if the file system has no space for this run's checkpoints of `checkpoint_bytes` each."""
        there = [*self._committed(), *(path for step in self.keep if (path := self.kept / step_name(step)).is_dir())]
        held = sum(file.stat().st_size for path in there for file in path.iterdir())
        needed = int((SPACE_FACTOR + len(self.keep)) * checkpoint_bytes) - held
        kept = f", {len(self.keep)} of them kept," if self.keep else ""
        require_space(self.directory, needed, f"checkpoints of {checkpoint_bytes / 2**20:.1f} MiB{kept}")

    def _read(self, path: Path) -> Checkpoint | None:
        """Return the intact checkpoint at `path`, or None if there is none; report and rename a damaged one.

        Raises: ForeignCheckpoint.
        """
        if not path.is_dir():
            return None
        try:
            checkpoint = read_checkpoint(path)
        except CorruptCheckpoint as error:
            self._set_aside("checkpoint_corrupt", path, str(error))
            return None
        check_identity(checkpoint, self.identity)
        return checkpoint

    def _committed(self) -> Iterator[Path]:
        """Yield the directories of the final checkpoint and of those in work/checkpoints, the newest first."""
        if self.final.is_dir():
            yield self.final
        found = [path for path in self.directory.glob("step-*") if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
        yield from sorted(found, reverse=True)

    def _set_aside(self, event: str, path: Path, why: str) -> None:
        """Report a checkpoint that must not be used, and rename it to `*.bad`; `finish` deletes it."""
        log.warning("%s is left out: %s", path.name, why)
        self._journal.event(event, path=path.name, why=why)
        faults.point("checkpoint.before_set_aside")
        aside = self.directory / f"{path.name}.bad"
        shutil.rmtree(aside, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        path.rename(aside)


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Raise ForeignCheckpoint, which names the differences of the configs, if the checkpoint has another identity."""
    found = checkpoint.state["identity"]
    if found["fingerprint"] == identity["fingerprint"]:
        return
    differences = ", ".join(config_differences(found["config"], identity["config"]))
    what = differences or "the configs are equal, the code or the inputs are not"
    raise ForeignCheckpoint(
        f"{checkpoint.path}: belongs to another identity, {found['fingerprint'][:16]} and not "
        f"{identity['fingerprint'][:16]}: {what}; move it away and start again"
    )
