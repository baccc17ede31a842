"""Training as a whole: what stops it, what it leaves, and the precisions.

In fp16 gradients that overflow are left out and said, and the scale belongs to the checkpoint.
"""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from implicit_llm.kernels.selection import KernelsUnavailable
from implicit_llm.models.mamba2.model import ImplicitMamba2ForCausalLM
from implicit_llm.solver.stats import NonFiniteState
from implicit_llm.training.batches import BatchSizeError
from implicit_llm.training.loop import TrainingLoop
from implicit_llm.training.metrics import StepMetrics
from implicit_llm.training.non_finite import NonFiniteTraining, UpdateGuard, judge
from implicit_llm_contracts.runs import journal
from tests.refusals import refused
from tests.unit.training.small_runs import (
    FREE,
    IMPLICIT,
    LLAMA,
    STEPS,
    Undisturbed,
    artifacts,
    events,
    logged,
    outcome,
    overflow_at,
    saved,
    train,
    train_config,
    train_until,
    work_of,
)

FP16 = train_config(precision="fp16")


def skipped_steps(run_dir: Path) -> list[int]:
    return [step for event in events(run_dir, "update_skipped") for step in event["steps"]]


def look_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where looking at a number in every step would mean to wait."""
    never = property(lambda guard: False, lambda guard, is_immediate: None)
    monkeypatch.setattr(UpdateGuard, "is_immediate", never, raising=False)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, is_immediate: bool
) -> None:
    weights = overflow_at(monkeypatch, {4})
    if not is_immediate:
        look_later(monkeypatch)
    with refused(r"train/a/only: .* at step 4 \(samples ", NonFiniteTraining) as caught:
        train(run_dir, train_config(), data, log_every_steps=6, save_steps=3)
    assert max(weights) == (3 if is_immediate else 5)
    assert torch.equal(weights[3], torch.nn.utils.parameters_to_vector(weights[-1]))
    assert caught.value.failure_class == "non_finite"
    assert saved(run_dir) == ["step-00000003"]
    report = json.loads((work_of(run_dir) / "non_finite.json").read_text())
    assert (report["step"], len(report["sample_indices"])) == (4, 8)
    assert report["recent"][2]["loss"] > 0


def test_a_state_of_the_solver_that_is_not_finite_stops_with_the_batch(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge = Mock(side_effect=NonFiniteState("sequence 3 is not finite at position 5"))
    monkeypatch.setattr(ImplicitMamba2ForCausalLM, "forward", diverge)
    with pytest.raises(NonFiniteTraining, match="sequence 3 is not finite at position 5 at step 1"):
        train(run_dir, train_config(), data)


@pytest.mark.parametrize("gradient", ["phantom", "series", "implicit"])
def test_a_loss_that_is_not_finite_ends_training_alike_with_every_gradient(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, gradient: str
) -> None:
    train_step = TrainingLoop.train_step

    def spoiled(loop: TrainingLoop, batches: list[dict[str, Any]]) -> None:
        if loop.global_step == 3:
            torch.nn.init.constant_(loop.model.lm_head.weight[:1], math.inf)
        train_step(loop, batches)

    monkeypatch.setattr(TrainingLoop, "train_step", spoiled)
    model, solver = {**IMPLICIT, "tie_word_embeddings": False}, {**FREE, "gradient": gradient}
    with pytest.raises(NonFiniteTraining, match="the loss is nan and the gradient norm nan at step 4"):
        train(run_dir, train_config(model, phase={"solver": solver}), data)
    assert json.loads((work_of(run_dir) / "non_finite.json").read_text())["step"] == 4


def test_an_implicit_gradient_whose_solve_becomes_nan_stops_with_the_batch(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge = Mock(side_effect=NonFiniteState("sequence 3 is not finite at position 5"))
    monkeypatch.setattr("implicit_llm.solver.implicit_gradient.solve", diverge)
    with pytest.raises(NonFiniteTraining, match="sequence 3 is not finite at position 5 at step 1"):
        train(run_dir, train_config(phase={"solver": {**FREE, "gradient": "implicit"}}), data)
    assert json.loads((work_of(run_dir) / "non_finite.json").read_text())["step"] == 1


def test_an_overflow_of_an_implicit_gradient_leaves_out_the_update(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: make(device, 2.0**24, enabled=enabled))
    solver = {**FREE, "gradient": "implicit"}
    train(run_dir, train_config(precision="fp16", phase={"solver": solver}), data)
    assert 1 in skipped_steps(run_dir)
    assert STEPS not in skipped_steps(run_dir)


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
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    if not is_fused:
        adamw = torch.optim.AdamW
        monkeypatch.setattr(
            "implicit_llm.training.optimizer.optim.AdamW", lambda *a, fused=False, **options: adamw(*a, **options)
        )
    weights, rates = overflow_at(monkeypatch, {3, 5}), []
    clip = TrainingLoop.clip_gradients
    monkeypatch.setattr(
        TrainingLoop, "clip_gradients", lambda loop: rates.append(loop.optimizer.param_groups[0]["lr"]) or clip(loop)
    )
    train(run_dir, FP16, data)
    assert skipped_steps(run_dir) == [3, 5]
    assert [torch.equal(weights[step], weights[step + 1]) for step in (2, 3, 4)] == [True, False, True]
    points = dict(logged(run_dir))
    assert [points[step]["skipped_updates"] for step in range(1, 9)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert rates == [points[step]["learning_rate"] for step in range(1, 9)]  # a step without an update counts
    assert all(points[step]["loss"] > 0 for step in points)
    state = json.loads((work_of(run_dir) / "checkpoint" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**14


def test_stops_change_nothing_and_the_scale_goes_on(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: make(device, 2.0**19, growth_interval=3, enabled=enabled)
    )
    overflow_at(monkeypatch, {2, 6})
    whole, parts = tmp_path / "whole" / "only", tmp_path / "parts" / "only"
    train(whole, FP16, data)
    for steps in (1, 1, 3, 1):  # so many each time: after 1, 2, 5 and 6
        train_until(f"train.after_step:sigterm@{steps}", parts, FP16, data)
    train(parts, FP16, data)
    assert outcome(parts) == outcome(whole)
    assert skipped_steps(parts) == skipped_steps(whole)
    assert {2, 6} <= set(skipped_steps(whole))


def test_on_an_accelerator_overflows_are_found_when_metrics_are_read_and_the_result_is_the_same(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow_at(monkeypatch, {2, 5})
    at_once, later = tmp_path / "at once" / "only", tmp_path / "later" / "only"
    train(at_once, FP16, data)
    look_later(monkeypatch)
    train(later, FP16, data, log_every_steps=4)
    assert artifacts(later) == artifacts(at_once)
    assert skipped_steps(later) == [2, 5]
    assert [values["skipped_updates"] for _, values in logged(later)] == [0, 1, 2]


def test_overflows_whatever_the_scale_stop_training_counted_over_a_stop(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("implicit_llm.training.loop.MAX_SKIPPED_IN_A_ROW", 3)
    overflow_at(monkeypatch, {2, 4, 5, 6, 7})
    train_until("train.after_step:sigterm@5", run_dir, FP16, data, save_steps=2)
    with refused("3 updates in a row were skipped at step 6 ", NonFiniteTraining):
        train(run_dir, FP16, data, save_steps=2)
    assert saved(run_dir) == ["step-00000004", "step-00000005"]


def test_a_loss_that_is_not_finite_stops_fp16_at_once(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, factors = StepMetrics.add, iter([1.0, 1.0, math.nan])  # there is no fourth step
    monkeypatch.setattr(StepMetrics, "add", lambda metrics, loss, *given: add(metrics, loss * next(factors), *given))
    with pytest.raises(NonFiniteTraining, match=r"the loss is nan .* at step 3 "):
        train(run_dir, FP16, data, log_every_steps=6)


def test_steps_are_judged_in_their_order() -> None:
    assert judge([(1.0, 2.0), (1.0, math.inf), (1.0, 1.0)], 10, 3, 0) == ([11], None)
    assert judge([(1.0, math.inf), (1.0, 1.0), (1.0, math.inf), (1.0, math.nan)], 10, 3, 1) == ([10, 12, 13], None)
    what = "the loss is 1 and the gradient norm inf"
    assert judge([(1.0, math.inf)], 10, 0, 0) == ([], (10, what))
    in_a_row = f"{what}, whatever the scale: 3 updates in a row were skipped"
    assert judge([(1.0, math.inf)], 10, 3, 2) == ([], (10, in_a_row))
    assert judge([(math.nan, math.inf)], 10, 3, 0)[1] is not None


def test_the_journal_has_loss_rate_speed_accuracy_and_solver_health(run_dir: Path, data: Path) -> None:
    train(run_dir, train_config(), data, log_every_steps=3)
    points = journal.read(work_of(run_dir) / "journal.jsonl")
    assert [point.step for point in points] == [1, 3, 6, 8]
    health = {"num_iter", "f_evaluations", "residual", "unconverged_share"}
    common = {"loss", "learning_rate", "grad_norm", "accuracy_last10"}
    cost = {"tokens", "flops", "tokens_per_s", "flops_per_s"}
    assert all(set(point.values) - {"mode_gap", "spectral_radius"} == common | health | cost for point in points)
    assert ["mode_gap" in point.values for point in points] == [False, False, True, False]  # measured in step 5
    assert all(point.values["tokens_per_s"] > 0 for point in points)
    assert [point.values["tokens"] for point in points] == [step * 8 * 12 for step in (1, 3, 6, 8)]


def test_the_published_stopping_rule_takes_the_whole_batch_at_once(tmp_path: Path, data: Path) -> None:
    tol = 0.3  # reached at different iterations by different sequences
    of_rule = {
        stop: train_config(phase={"solver": {**FREE, "max_iter": 30, "tol": tol, "stop": stop}})
        for stop in ("batch", "sequence")
    }
    with pytest.raises(BatchSizeError, match="all 8 sequences in one micro-batch on one device, not 4"):
        train(tmp_path / "split", of_rule["batch"], data, micro_batch_size=4)
    for stop, config in of_rule.items():
        train(tmp_path / stop, config, data, log_every_steps=1)
    coupled, alone = ([row["num_iter"] for _, row in logged(tmp_path / stop)] for stop in of_rule)
    assert all(number == int(number) for number in coupled)  # that of the worst sequence
    assert any(number != int(number) for number in alone)  # a mean over the sequences
    assert sum(coupled) > sum(alone)


def test_a_last_save_that_finds_the_disk_full_stops_training(run_dir: Path, data: Path) -> None:
    assert "disk is full" in train_until("checkpoint.after_model:enospc@1", run_dir, train_config(), data)


def test_a_grace_that_is_shorter_than_a_save_is_warned_of(
    run_dir: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_dir, train_config(), data, grace_s=0.0)
    assert "longer than the grace" in caplog.text


def test_nothing_but_the_artifacts_is_left_in_the_work_directory(
    tmp_path: Path, run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(run_dir, train_config(), data, save_steps=2)
    found = {path.name for path in work_of(run_dir).iterdir()}
    records = {"commit.json", "journal.jsonl", "manifest.json", "provenance.json", "training.json"}
    assert found == {"checkpoint", "config.json", "declared", "model", *records}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_kernels_that_cannot_run_are_refused(run_dir: Path, data: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="choose torch"):
        train(run_dir, train_config(), data, kernels="triton")
