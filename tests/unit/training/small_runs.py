"""Small training runs through the whole frame: a data set of S3 word problems and phases of a few steps on it.

Run as a script, it trains a phase in every process of torchrun; without torchrun, in two processes of the workflow's
launcher. Arguments: run directory, data run directory, JSON of {"config": name in CONFIGS, "runtime": {...}, "poison":
{"rank", "step", "what"} or nothing}. what: "loss", "solver", "memory", "kill" or "hang".
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from implicit_llm.solver.fixed_point import Best
from implicit_llm.solver.stats import NonFiniteState
from implicit_llm.training import stage
from implicit_llm.training.loop import TrainingLoop
from implicit_llm_contracts.errors import Preempted
from implicit_llm_contracts.runs import faults, journal
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.launched import report_failure
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetSpec
from implicit_llm_jobs.stage import StageRequest, run_stage
from implicit_llm_workflow.launching.launch import Ended, launch
from tests.unit.evaluation.finished_runs import word_problems

LENGTH = 12
STEPS = 8
NUM_SAMPLES = 50  # with batches of 8, epochs end within a step
UNROLLED = {"mode": "unrolled", "num_unroll": 2}
MEASURED = {"tokens_per_s", "flops_per_s", "mfu", "memory_gib"}
FREE = {"mode": "fixed_point", "max_iter": 4, "tol": 0.05, "phantom_steps": 2}

IMPLICIT: dict[str, Any] = {
    "model_type": "implicit_mamba2",
    "vocab_size": 6,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "expand": 2,
    "head_dim": 8,
    "state_size": 8,
    "dropout": 0.1,  # so that the random state matters
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 6,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
}

LSTM: dict[str, Any] = {"model_type": "lstm", "vocab_size": 6, "hidden_size": 16}
EXPLICIT = {**IMPLICIT, "is_implicit": False, "dropout": 0.0}


def train_config(model: Mapping[str, Any] = IMPLICIT, **changes: Any) -> dict[str, Any]:
    """Config of a single phase of STEPS steps; `phase` in `changes` is laid over its fields."""
    phase = {"name": "only", "index": 0, "start_step": 0, "end_step": STEPS, "solver": None}
    if model["model_type"].startswith("implicit") and model.get("is_implicit", True):
        phase["solver"] = FREE
    phase |= changes.pop("phase", {})
    config = {
        "task": "word_problem",
        "labels": "aligned",
        "model": dict(model),
        "phase": phase,
        "total_steps": STEPS,
        "schedule": {
            "kind": "linear",
            "peak_learning_rate": 0.01,
            "final_learning_rate": 0.0,
            "warmup_fraction": 0.25,
        },
        "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 0.25},
        "batch_size": 8,
        "precision": "fp32",
        "seed": 3,
    }
    return {**config, **changes}


def make_model(fields: Mapping[str, Any], **changes: Any) -> Any:
    """An untrained model of this configuration."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, **changes))


def make_data(results: Path) -> Path:
    """A training set; returns its run directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # session fixtures run before the fixture that leaves it out
        run_dir = results / "data" / "s3-train"
        return word_problems(run_dir, length=LENGTH, num_samples=NUM_SAMPLES, split="train", shard_samples=32)


def make_rows(run_dir: Path, *, vocab_size: int = 16, ignored_share: float = 0.0, **about: int) -> Path:
    """A data set of random rows, the labels of which are the inputs; a share of them is ignored. Returns `run_dir`.

    `about`: more that its configuration says.
    """
    rng = np.random.default_rng(5)
    rows = rng.integers(1, vocab_size, (NUM_SAMPLES, LENGTH), dtype=np.uint8)
    rows[:, 1::2] = rows[:, :-1:2]  # something to learn: every other token is the one before
    labels = np.where(rng.random(rows.shape) < ignored_share, 0, rows).astype(np.uint8)

    def body(context: StageContext) -> StageResult:
        spec = DatasetSpec(vocab_size, LENGTH, ("input_ids", "labels"), {"kind": "rows"}, ignored_id=0)
        return StageResult(write_shards(context, spec, 1, lambda shard: {"input_ids": rows, "labels": labels}), {})

    config = {"kind": "rows", "vocab_size": vocab_size, "ignored_share": ignored_share, **about}
    run_stage(StageRequest(run_dir, Identity("data", run_dir.name, config, "c0de", {})), body)
    return run_dir


def request(
    run_dir: Path, config: dict[str, Any], data: Path, start: Path | None = None, **runtime: Any
) -> StageRequest:
    inputs = {"data": data} | ({} if start is None else {"start": start})
    upstream = {role: Manifest.read(path / "manifest.json").fingerprint for role, path in inputs.items()}
    identity = Identity("train", "/".join(run_dir.parts[-2:]), config, "c0de", upstream)
    given = {"device": "cpu", "threads": 1, "log_every_steps": 1, "progress": "log", **runtime}
    return StageRequest(run_dir, identity, inputs, given)


def train(run_dir: Path, config: dict[str, Any], data: Path, start: Path | None = None, **runtime: Any) -> Manifest:
    """Run one phase to its end."""
    manifest = run_stage(request(run_dir, config, data, start, **runtime), stage.run)
    assert manifest is not None
    return manifest


def work_of(run_dir: Path) -> Path:
    (work,) = [path for path in (run_dir / "work").iterdir() if path.is_dir()]
    return work


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    """Events of the journal, on request those of these names alone."""
    found = journal.read_records(work_of(run_dir) / "journal.jsonl")
    return [record for record in found if record["kind"] == "event" and (not names or record["name"] in names)]


def saved(run_dir: Path) -> list[str]:
    """Names of the checkpoints from which a stopped phase can go on."""
    return sorted(path.name for path in (work_of(run_dir) / "checkpoints").iterdir())


def logged(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Points of the journal without measured speed."""
    points = journal.read(work_of(run_dir) / "journal.jsonl")
    return [(point.step, {k: v for k, v in point.values.items() if k not in MEASURED}) for point in points]


def artifacts(run_dir: Path) -> dict[str, str]:
    """Digests of all that a finished phase leaves."""
    manifest = Manifest.read(run_dir / "manifest.json")
    prefix = work_of(run_dir).relative_to(run_dir).as_posix() + "/"
    return {record.path.removeprefix(prefix): record.sha256 for record in manifest.files}


def outcome(run_dir: Path) -> tuple[dict[str, str], list]:
    """What may not depend on stops: the artifacts and the points of the journal."""
    return artifacts(run_dir), logged(run_dir)


def flip_last_byte(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 255]))


def overflow_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> dict[int, torch.Tensor]:
    """Let the gradient of these steps be infinite, as too large a scale would.

    Returns the weights after each step, as the next one finds them, and those of the model as they are.
    """
    clip, weights = TrainingLoop.clip_gradients, {}

    def overflow_and_clip(loop: TrainingLoop) -> torch.Tensor:
        parameters = list(loop.model.parameters())
        weights[loop.global_step] = torch.nn.utils.parameters_to_vector(parameters).detach()
        weights[-1] = parameters
        if loop.global_step + 1 in steps:
            parameters[0].grad.view(-1)[0] = math.inf
        return clip(loop)

    monkeypatch.setattr(TrainingLoop, "clip_gradients", overflow_and_clip)
    return weights


@contextmanager
def inject(fault: str) -> Iterator[None]:
    """Context in which the fault `point:kind@hit` strikes."""
    with mock.patch.dict(os.environ, IMPLICIT_LLM_FAULT=fault):
        faults.reset()
        yield


ERRORS = {"raise": faults.FaultInjected, "sigterm": Preempted, "enospc": StorageError}


def train_until(fault: str, run_dir: Path, config: dict[str, Any], data: Path, **runtime: Any) -> str:
    """Train until the fault `point:kind@hit` strikes; return the message of the error with which training ends."""
    kind = fault.partition(":")[2].partition("@")[0]
    with inject(fault), pytest.raises(ERRORS[kind]) as caught:
        train(run_dir, config, data, **runtime)
    return str(caught.value)


class Undisturbed:
    """Runs without a stop, one a config; nobody changes them."""

    def __init__(self, root: Path, data: Path) -> None:
        self._root = root
        self._data = data
        self._known: dict[str, Path] = {}

    def run_dir(self, config: dict[str, Any], **runtime: Any) -> Path:
        key = repr((config, runtime))
        if key not in self._known:
            self._known[key] = self._root / f"run{len(self._known)}" / "only"
            train(self._known[key], config, self._data, **runtime)
        return self._known[key]

    def of(self, config: dict[str, Any], **runtime: Any) -> tuple[dict[str, str], list]:
        return outcome(self.run_dir(config, **runtime))


FEW_STEPS, MANY_STEPS = 6, 200
_SHORT: dict[str, Any] = {"phase": {"end_step": FEW_STEPS}, "total_steps": FEW_STEPS}
# Without dropout: each process draws masks of its own.
CONFIGS = {
    "explicit": train_config({**LLAMA, "attention_dropout": 0.0}, **_SHORT),
    "long": train_config({**LLAMA, "attention_dropout": 0.0}, phase={"end_step": MANY_STEPS}, total_steps=MANY_STEPS),
    "implicit": train_config(
        {**IMPLICIT, "dropout": 0.0}, phase={"end_step": FEW_STEPS, "solver": FREE}, total_steps=FEW_STEPS
    ),
}
CONFIGS["implicit, sums in bf16"] = CONFIGS["implicit"] | {"reduction": "bf16"}


def poison(rank: int, step: int, what: str) -> None:
    """Let one rank's loss, its solver or its memory fail in one step, or the whole rank: killed, hanging."""
    train_step = TrainingLoop.train_step

    def goes_wrong(loop: TrainingLoop, batches: list[dict[str, Any]]) -> None:
        if (int(os.environ["RANK"]), loop.global_step + 1) == (rank, step):
            WRONG[what](loop)
        train_step(loop, batches)

    TrainingLoop.train_step = goes_wrong  # type: ignore[method-assign]


def _spoil_the_loss(loop: TrainingLoop) -> None:
    compute_loss = loop.compute_loss

    def spoiled(*given: Any) -> tuple[Tensor, Any]:
        loss, outputs = compute_loss(*given)
        return loss * math.nan, outputs

    loop.compute_loss = spoiled  # type: ignore[method-assign]


def _let_the_solver_diverge(loop: TrainingLoop) -> None:
    became_nan = NonFiniteState("the fixed-point iteration became NaN at position 5")
    Best.raise_if_not_finite = Mock(side_effect=became_nan)  # type: ignore[method-assign]


def _flip_a_bit(loop: TrainingLoop) -> None:
    next(loop.model.parameters()).data.view(-1).view(torch.int32)[3] ^= 1 << 16


WRONG: dict[str, Callable[[TrainingLoop], object]] = {
    "loss": _spoil_the_loss,
    "solver": _let_the_solver_diverge,
    "memory": _flip_a_bit,
    "kill": lambda loop: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda loop: threading.Event().wait(),
}


def launched() -> int:
    """Start this module through the launcher, and end as the command line does."""
    try:
        launch(1, 2, Path(sys.argv[1]), ("-m", "tests.unit.training.small_runs", *sys.argv[1:]), 1)
    except Ended as end:
        report_failure(end)
        sys.stderr.write(f"error: {end}\n")
        return end.exit_code
    return 0


def main() -> int:
    if "RANK" not in os.environ:
        return launched()
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own
    run_dir, data, order = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if order["poison"] is not None:
        poison(**order["poison"])
    try:
        run_stage(request(run_dir, CONFIGS[order["config"]], data, **order["runtime"]), stage.run)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
