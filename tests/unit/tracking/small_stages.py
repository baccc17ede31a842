"""Tiny stages, run as all stages are: a data set, a model that is trained on it, an evaluation of both."""

import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import Body, StageRequest, run_stage
from implicit_llm_jobs.tracking.tracked_run import VARIABLE

WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"  # a safetensors file without tensors
MODEL = {"model_type": "implicit_mamba2", "is_implicit": True, "num_hidden_layers": 1, "hidden_size": 32}
TRAIN_CONFIG = {"task": "word_problem", "model": MODEL, "phase": {"name": "free", "tol": 0.05}, "seed": 3}


def make_data(results: Path, body: Body | None = None) -> Path:
    """Run directory of the data set s3-train."""
    return make(results / "demo" / "data" / "s3-train", {"kind": "word_problem", "length": 8}, body=body or data)


def make_model(results: Path, inputs: dict[str, Path], body: Body | None = None, run: str = "s3-implicit-s3") -> Path:
    """Run directory of the phase `free`."""
    return make(results / "demo" / "train" / run / "free", TRAIN_CONFIG, inputs, body or train)


def make_chain(results: Path) -> tuple[Path, Path, Path]:
    """All of them: also an evaluation of `model` on `s3-test`."""
    made = make_data(results)
    model = make_model(results, {"data": made})
    run_dir = results / "demo" / "evaluate" / "s3-implicit-s3" / "free" / "word-problem"
    config = {"kind": "word_problem", "modes": [{"name": "blockwise"}]}
    return made, model, make(run_dir, config, {"model": model, "s3-test": made}, evaluate)


def make(
    run_dir: Path, config: dict[str, Any], inputs: dict[str, Path] | None = None, body: Body | None = None
) -> Path:
    """Run a stage, named after the place of its directory."""
    stage, *name = run_dir.parts[run_dir.parts.index("results") + 2 :]
    inputs = inputs or {}
    upstream = {role: Manifest.read(path / "manifest.json").fingerprint for role, path in inputs.items()}
    identity = Identity(stage, "/".join(name), config, "c0de", upstream)
    run_stage(StageRequest(run_dir, identity, inputs), body or data)
    return run_dir


def data(context: StageContext) -> StageResult:
    (context.work / "tokens.npy").write_bytes(bytes(64))
    return StageResult(["tokens.npy"], {"num_samples": 8})


def train(context: StageContext) -> StageResult:
    for step in (1, 2, 3):
        context.journal.metrics(step, {"loss": 1 / step, "residual": 0.1 / step, "tokens_per_s": 100.0})
    return train_result(context)


def train_result(context: StageContext) -> StageResult:
    """A model of no weights."""
    folder = context.work / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return StageResult(["model"], {"global_step": 3, "num_parameters": 1234, "metrics": {"loss": 1 / 3}})


def evaluate(context: StageContext) -> StageResult:
    context.journal.metrics(1, {"accuracy_last10.s3-test.blockwise": 0.75})
    return StageResult([], {"best_accuracy_last10": {"s3-test": 0.75}})


def preempted(context: StageContext) -> StageResult:
    """Ends after a step, as a job does that is asked to stop."""
    context.journal.metrics(1, {"loss": 1.0, "residual": 0.1, "tokens_per_s": 100.0})
    raise SystemExit(75)


def fail(context: StageContext) -> StageResult:
    raise RuntimeError("no")


def start_invocation(patch: pytest.MonkeyPatch, number: int = 1) -> None:
    """What the driver does."""
    about = {"id": f"{number:016x}", "user": "jo"}
    patch.setenv(VARIABLE, json.dumps({**about, "command": "snakemake --cores 2"}))
