"""fp16: gradients that overflow are left out and said, and the scale belongs to the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from implicit_llm.training.loop import TrainingLoop
from implicit_llm.training.metrics import StepMetrics
from implicit_llm.training.non_finite import NonFiniteTraining, UpdateGuard, judge
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.errors import Preempted
from tests.unit.training.small_runs import (
    IMPLICIT,
    LLAMA,
    Inject,
    Undisturbed,
    artifacts,
    logged,
    outcome,
    train,
    train_config,
    work_of,
)

INF = float("inf")
NAN = float("nan")


def skipped_steps(run_dir: Path) -> list[int]:
    events = journal.read_events(work_of(run_dir) / "journal.jsonl")
    return [step for event in events if event["name"] == "update_skipped" for step in event["steps"]]


def start_scale_at(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    make = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: make(device, scale, growth_interval=3, enabled=enabled)
    )


def overflow_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Let the gradient of these steps be infinite, as too large a scale would."""
    original = TrainingLoop.clip_gradients

    def overflowing(self: TrainingLoop) -> torch.Tensor:
        if self.global_step + 1 in steps:
            next(parameter for parameter in self.model.parameters()).grad.view(-1)[0] = INF  # type: ignore[union-attr]
        return original(self)

    monkeypatch.setattr(TrainingLoop, "clip_gradients", overflowing)


def look_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where looking at a number in every step would mean to wait."""
    make_guard = UpdateGuard.__init__

    def make(self: UpdateGuard, *arguments: Any, **options: Any) -> None:
        make_guard(self, *arguments, **options)
        self.is_immediate = False

    monkeypatch.setattr(UpdateGuard, "__init__", make)


@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("model", [IMPLICIT, LLAMA])
def test_low_precision_trains_with_weights_in_fp32_and_about_the_losses_of_fp32(
    undisturbed: Undisturbed, model: dict[str, Any], low: str
) -> None:
    runs = [undisturbed.run_dir(train_config(model, precision=name)) for name in (low, "fp32")]
    stored = load_file(work_of(runs[0]) / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    half, full = ([values for _, values in logged(run)] for run in runs)
    assert [values["loss"] for values in half] == pytest.approx([values["loss"] for values in full], rel=0.02)
    assert half != full
    # Of the unscaled gradient.
    assert [values["grad_norm"] for values in half] == pytest.approx([v["grad_norm"] for v in full], rel=0.1)


@pytest.mark.parametrize("is_fused", [True, False])
def test_an_overflow_leaves_out_one_update_and_training_goes_on(
    run_dir: Path, data: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    if not is_fused:
        adamw = torch.optim.AdamW
        monkeypatch.setattr(
            "implicit_llm.training.optimizer.optim.AdamW", lambda *a, fused=False, **options: adamw(*a, **options)
        )
    weights: dict[int, torch.Tensor] = {}
    overflow_at(monkeypatch, {3, 5})
    clip = TrainingLoop.clip_gradients

    def watched(self: TrainingLoop) -> torch.Tensor:
        weights[self.global_step] = next(iter(self.model.parameters())).detach().clone()
        return clip(self)

    monkeypatch.setattr(TrainingLoop, "clip_gradients", watched)
    train(run_dir, train_config(precision="fp16"), data)
    assert skipped_steps(run_dir) == [3, 5]
    assert torch.equal(weights[2], weights[3])
    assert torch.equal(weights[4], weights[5])
    assert not torch.equal(weights[3], weights[4])
    points = dict(logged(run_dir))
    assert [points[step]["skipped_updates"] for step in range(1, 9)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert all(points[step]["loss"] > 0 for step in points)
    state = json.loads((work_of(run_dir) / "checkpoint" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**14
    # The rate is a function of the step, also after an update that was left out.
    monkeypatch.undo()
    others = undisturbed.of(train_config())[1]
    assert [points[step]["learning_rate"] for step in points] == [values["learning_rate"] for _, values in others]


def test_stops_change_nothing_and_the_scale_goes_on(
    tmp_path: Path, data: Path, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_scale_at(monkeypatch, 2.0**19)
    overflow_at(monkeypatch, {2, 6})
    whole, parts = tmp_path / "whole" / "only", tmp_path / "parts" / "only"
    train(whole, train_config(precision="fp16"), data)
    for steps in (1, 1, 3, 1):  # so many each time: after 1, 2, 5 and 6
        with inject(f"train.after_step:sigterm@{steps}"), pytest.raises(Preempted):
            train(parts, train_config(precision="fp16"), data)
    train(parts, train_config(precision="fp16"), data)
    assert outcome(parts) == outcome(whole)
    assert skipped_steps(parts) == skipped_steps(whole)
    assert {2, 6} <= set(skipped_steps(whole))


def test_overflows_whatever_the_scale_stop_training(run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("implicit_llm.training.loop.MAX_SKIPPED_IN_A_ROW", 3)
    overflow_at(monkeypatch, {2, 4, 5, 6, 7})
    with pytest.raises(NonFiniteTraining, match="3 updates in a row were skipped at step 6 ") as caught:
        train(run_dir, train_config(precision="fp16"), data, save_steps=2)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in (work_of(run_dir) / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]


def test_on_an_accelerator_overflows_are_found_when_metrics_are_read_and_the_result_is_the_same(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow_at(monkeypatch, {2, 5})
    at_once, later = tmp_path / "at once" / "only", tmp_path / "later" / "only"
    train(at_once, train_config(precision="fp16"), data)
    look_later(monkeypatch)
    train(later, train_config(precision="fp16"), data, log_every_steps=4)
    assert artifacts(later) == artifacts(at_once)
    assert skipped_steps(later) == [2, 5]
    assert [values["skipped_updates"] for _, values in logged(later)] == [0, 1, 2]
    monkeypatch.setattr("implicit_llm.training.loop.MAX_SKIPPED_IN_A_ROW", 3)
    overflow_at(monkeypatch, {3, 4, 5, 6})
    with pytest.raises(NonFiniteTraining, match="3 updates in a row were skipped at step 4 "):  # 2 is the first
        train(tmp_path / "stopped" / "only", train_config(precision="fp16"), data, log_every_steps=7)


def test_overflows_in_a_row_are_counted_over_a_stop(
    run_dir: Path, data: Path, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("implicit_llm.training.loop.MAX_SKIPPED_IN_A_ROW", 3)
    overflow_at(monkeypatch, {4, 5, 6})
    with inject("train.after_step:sigterm@5"), pytest.raises(Preempted):
        train(run_dir, train_config(precision="fp16"), data)
    with pytest.raises(NonFiniteTraining, match="at step 6 "):
        train(run_dir, train_config(precision="fp16"), data)


def test_a_loss_that_is_not_finite_stops_fp16_at_once(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = StepMetrics.add
    losses: list[torch.Tensor] = []

    def spoiled(self: StepMetrics, loss: torch.Tensor, *arguments: Any) -> None:
        losses.append(loss)
        add(self, loss * NAN if len(losses) == 3 else loss, *arguments)

    monkeypatch.setattr(StepMetrics, "add", spoiled)
    with pytest.raises(NonFiniteTraining, match=r"the loss is nan .* at step 3 "):
        train(run_dir, train_config(precision="fp16"), data)
    assert len(losses) == 3


def test_steps_are_judged_in_their_order() -> None:
    assert judge([(1.0, 2.0), (1.0, INF), (1.0, 1.0)], 10, 3, 0) == ([11], None)
    assert judge([(1.0, INF), (1.0, 1.0), (1.0, INF), (1.0, NAN)], 10, 3, 1) == ([10, 12, 13], None)
    skipped, bad = judge([(1.0, INF)], 10, 3, 2)
    assert (skipped, bad and bad[0]) == ([], 10)
    assert judge([(NAN, INF)], 10, 3, 0)[1] is not None
    assert judge([(1.0, INF)], 10, 0, 0)[1] == (10, "the loss is 1 and the gradient norm inf")
