"""One checkpoint on disk: a directory that appears whole, by rename, with digests of all it holds. Nothing is pickled.

model.safetensors        parameters and persistent buffers
optimizer.safetensors    "<parameter>.<exp_avg, exp_avg_sq, step>"
random.safetensors       "<rank>.<torch, cuda>", uint8
state.json               global_step, phase, identity, random states of Python and numpy, gradient scale, metrics
checkpoint.json          size and sha256 of each of these, written last
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import commit_directory, storage_errors
from implicit_llm_contracts.runs.manifest import sha256_of

FORMAT = 3
MODEL, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
STATE, DIGESTS = "state.json", "checkpoint.json"
_FILES = (MODEL, OPTIMIZER, RANDOM, STATE)


class TornCheckpoint(Exception):
    """There is no whole checkpoint.json: the writer was stopped before the commit."""


class CorruptCheckpoint(Exception):
    """A file of a committed checkpoint is not the one that was written."""


@dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint holds; `random` has one (values, tensors) for each rank.

    identity: {"stage", "fingerprint", "config"} of the run. metrics: see StepMetrics.state. scaler: state of the
    gradient scaler, None without one.
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
        """Size of the tensors."""
        return sum(tensor.nbytes for tensors in (self.model, self.optimizer) for tensor in tensors.values())


class Staging:
    """Host memory for a copy of a training state, so that training goes on while the copy is written.

    Pinned for a GPU, whose copies are then several times as fast; one piece, as pinned pieces are rounded up to powers
    of two. The next copy overwrites the last.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, state: TrainingState) -> TrainingState:
        """The state with its model and optimizer in this memory."""
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
    """A committed checkpoint whose digests were right when it was read.

    state: what state.json holds, of `TrainingState`: global_step, identity, metrics and scaler.
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
        """Random states of a rank, None when the checkpoint was written by fewer of them."""
        if rank >= len(self.state["random"]):
            return None
        prefix, found = f"{rank}.", load_file(self.path / RANDOM)
        own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        return self.state["random"][rank], own


def write_checkpoint(state: TrainingState, final_dir: Path) -> None:
    """Write beside `final_dir`, then commit by rename.

    Raises: StorageError for a full or unwritable disk, with nothing left behind.
    """
    tmp_dir = final_dir.with_name(f"{final_dir.name}.tmp")
    try:
        with storage_errors(final_dir, state.num_bytes), _safetensors_errors(final_dir):
            shutil.rmtree(tmp_dir, ignore_errors=True)
            faults.point("checkpoint.before_data")
            tmp_dir.mkdir(parents=True)
            _write_files(state, tmp_dir)
            faults.point("checkpoint.before_commit")
            commit_directory(tmp_dir, final_dir, state.num_bytes)
    except BaseException:
        shutil.rmtree(tmp_dir, ignore_errors=True)
        raise
    faults.point("checkpoint.after_commit")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every digest.

    Raises: TornCheckpoint; CorruptCheckpoint that names the file, what was expected and what was found.
    """
    try:
        digests = json.loads((path / DIGESTS).read_bytes())
        records = {str(name): (int(record["size"]), str(record["sha256"])) for name, record in digests["files"].items()}
        is_whole = digests["format"] == FORMAT and set(_FILES) <= set(records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise TornCheckpoint(f"{path / DIGESTS}: missing or incomplete")
    for name, record in records.items():
        file = path / name
        found = (file.stat().st_size, sha256_of(file)) if file.is_file() else (0, "no file")
        if found != record:
            raise CorruptCheckpoint(
                f"{file}: expected {record[0]} bytes, sha256 {record[1]}; found {found[0]} bytes, {found[1]}"
            )
    return Checkpoint(path, json.loads((path / STATE).read_bytes()))


def _write_files(state: TrainingState, directory: Path) -> None:
    _save(state.model, directory / MODEL)
    faults.point("checkpoint.after_model")
    _save(state.optimizer, directory / OPTIMIZER)
    random = {f"{rank}.{name}": tensor for rank, (_, part) in enumerate(state.random) for name, tensor in part.items()}
    _save(random, directory / RANDOM)
    values = {
        "format": FORMAT,
        "global_step": state.global_step,
        "identity": dict(state.identity),
        "random": [dict(values) for values, _ in state.random],
        "metrics": dict(state.metrics),
        "scaler": None if state.scaler is None else dict(state.scaler),
    }
    _write_json(values, directory / STATE)
    faults.point("checkpoint.before_digests")
    files = {
        name: {"size": (directory / name).stat().st_size, "sha256": sha256_of(directory / name)} for name in _FILES
    }
    _write_json({"format": FORMAT, "global_step": state.global_step, "files": files}, directory / DIGESTS)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    faults.point("checkpoint.before_file")
    # No metadata: with more than one key its order, and so the digest, would differ from run to run.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _write_json(values: Mapping[str, Any], path: Path) -> None:
    faults.point("checkpoint.before_values")
    path.write_text(json.dumps(values, sort_keys=True, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """safetensors reports a full disk in words of its own."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(path)) from error
