"""What only an accelerator shows: updates left out on the device, memory, several devices."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from implicit_llm.training.non_finite import NonFiniteTraining
from implicit_llm_contracts.runs import journal
from tests.unit.training.small_runs import (
    CONFIGS,
    IMPLICIT,
    LLAMA,
    logged,
    overflow_at,
    train,
    train_config,
    train_until,
    work_of,
)
from tests.unit.training.test_distributed import train_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ON_GPU: dict[str, Any] = {"device": "cuda", "kernels": "torch"}


def losses(run_dir: Path) -> list[float]:
    return [values["loss"] for _, values in logged(run_dir)]


@pytest.mark.parametrize("model", [IMPLICIT, LLAMA])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_gives_about_the_losses_of_the_cpu(
    tmp_path: Path, data: Path, model: dict[str, Any], precision: str
) -> None:
    still = {**model, "dropout": 0.0} if model is IMPLICIT else {**model, "attention_dropout": 0.0}
    config = train_config(still, precision=precision)
    train(tmp_path / "cpu" / "only", train_config(still), data)
    train(tmp_path / "gpu" / "only", config, data, **ON_GPU)
    assert losses(tmp_path / "gpu" / "only") == pytest.approx(losses(tmp_path / "cpu" / "only"), rel=0.03)
    points = journal.read(work_of(tmp_path / "gpu" / "only") / "journal.jsonl")
    assert all(point.values["memory_gib"] > 0 for point in points)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_stop_on_a_gpu_costs_no_more_than_rounding(tmp_path: Path, data: Path, precision: str) -> None:
    config = train_config(precision=precision)
    whole, parts = tmp_path / "whole" / "only", tmp_path / "parts" / "only"
    train(whole, config, data, **ON_GPU)
    train_until("train.after_step:sigterm@4", parts, config, data, **ON_GPU)
    train(parts, config, data, **ON_GPU)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_that_is_not_finite_never_reaches_the_weights(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    weights = overflow_at(monkeypatch, {4})
    # In fp16 one update is left out.
    stopped = pytest.raises(NonFiniteTraining, match="at step 4 ") if precision == "bf16" else nullcontext()
    with stopped:
        train(run_dir, train_config(precision=precision), data, log_every_steps=6, **ON_GPU)
    assert torch.equal(weights[3], weights[4])
    assert torch.equal(weights[4], weights[5]) == (precision == "bf16")  # bf16 leaves out all later ones too
    assert all(weights[step].isfinite().all() for step in range(6))


def test_computing_activations_again_gives_the_same_losses_on_a_gpu(tmp_path: Path, data: Path) -> None:
    for name, again in (("stored", False), ("again", True)):
        train(tmp_path / name / "only", train_config(precision="bf16"), data, gradient_checkpointing=again, **ON_GPU)
    assert losses(tmp_path / "again" / "only") == pytest.approx(losses(tmp_path / "stored" / "only"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", ["explicit", "implicit"])
def test_two_gpus_give_the_loss_curve_of_one(tmp_path: Path, data: Path, config: str) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    code, errors = train_together(together, data, 2, config, micro_batch_size=2, **ON_GPU)
    assert code == 0, errors[-2000:]
    train(alone, CONFIGS[config], data, **ON_GPU)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    found, expected = (load_file(work_of(run) / "checkpoint" / "model.safetensors") for run in (together, alone))
    assert all(torch.allclose(found[name], expected[name], atol=1e-3) for name in expected)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_is_not_finite_on_one_gpu_stops_both(run_dir: Path, data: Path) -> None:
    poison = {"rank": 1, "step": 4, "what": "solver"}
    code, errors = train_together(run_dir, data, 2, "implicit", poison=poison, save_steps=3, **ON_GPU)
    assert code != 0
    lines = [line for line in errors.splitlines() if "NonFiniteTraining: " in line]
    assert len(lines) == 2
    assert all("rank 1: the fixed-point iteration became NaN at position 5 at step 4" in line for line in lines)
