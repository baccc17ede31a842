from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.kernels.selection import KernelsUnavailable
from implicit_llm.training import non_finite
from implicit_llm.training.batches import BatchSizeError
from implicit_llm.training.loop import TrainingLoop
from implicit_llm.training.non_finite import NonFiniteTraining
from implicit_llm.training.operations.status import StatusLine, duration
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import StorageError
from tests.unit.training.small_runs import FREE, Inject, logged, train, train_config, work_of


def events(run_dir: Path) -> list[str]:
    return [event["name"] for event in journal.read_events(work_of(run_dir) / "journal.jsonl")]


def spoil_loss_at(monkeypatch: pytest.MonkeyPatch, step: int, factor: float) -> None:
    original = TrainingLoop.compute_loss

    def spoiled(self: TrainingLoop, *arguments: Any, **options: Any) -> Any:
        loss = original(self, *arguments, **options)
        return loss * factor if self.global_step + 1 == step else loss

    monkeypatch.setattr(TrainingLoop, "compute_loss", spoiled)


@pytest.mark.parametrize(("is_immediate", "factor"), [(True, math.nan), (False, math.inf)])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, is_immediate: bool, factor: float
) -> None:
    weights: dict[int, list[torch.Tensor]] = {}
    clip, make_guard = TrainingLoop.clip_gradients, non_finite.UpdateGuard.__init__

    def watched(self: TrainingLoop) -> torch.Tensor:
        weights[self.global_step] = [parameter.detach().clone() for parameter in self.model.parameters()]
        weights[-1] = list(self.model.parameters())
        return clip(self)

    def make(self: non_finite.UpdateGuard, *arguments: Any, **options: Any) -> None:
        make_guard(self, *arguments, **options)
        assert self.is_immediate
        self.is_immediate = is_immediate  # False on an accelerator

    monkeypatch.setattr(TrainingLoop, "clip_gradients", watched)
    monkeypatch.setattr(non_finite.UpdateGuard, "__init__", make)
    spoil_loss_at(monkeypatch, 4, factor)
    with pytest.raises(NonFiniteTraining, match=r"train/a/only: .* at step 4 \(samples ") as caught:
        train(run_dir, train_config(), data, log_every_steps=6, save_steps=3)
    assert max(weights) == (3 if is_immediate else 5)
    assert all(torch.equal(before, after) for before, after in zip(weights[3], weights[-1], strict=True))
    assert "\n" not in str(caught.value)
    assert caught.value.failure_class == "non_finite"
    assert [path.name for path in (work_of(run_dir) / "checkpoints").iterdir()] == ["step-00000003"]
    report = json.loads((work_of(run_dir) / "non_finite.json").read_text())
    assert report["step"] == 4
    assert len(report["sample_indices"]) == 8
    assert report["recent"][2]["loss"] > 0


def test_a_state_of_the_solver_that_is_not_finite_stops_with_the_batch(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from implicit_llm.models.causal_lm import ImplicitMamba2ForCausalLM
    from implicit_llm.solver.stats import NonFiniteState

    def diverge(*arguments: Any, **options: Any) -> None:
        raise NonFiniteState("sequence 3 is not finite at position 5")

    monkeypatch.setattr(ImplicitMamba2ForCausalLM, "forward", diverge)
    with pytest.raises(NonFiniteTraining, match="sequence 3 is not finite at position 5 at step 1"):
        train(run_dir, train_config(), data)


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


def test_one_save_that_finds_the_disk_full_is_left_out_and_training_goes_on(
    run_dir: Path, data: Path, inject: Inject
) -> None:
    with inject("checkpoint.after_model:enospc@2"):
        train(run_dir, train_config(), data, save_steps=2)
    assert "checkpoint_failed" in events(run_dir)
    assert events(run_dir).count("checkpoint_committed") == 3


def test_two_saves_in_a_row_that_find_the_disk_full_stop_training(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from implicit_llm.training.operations import checkpoint

    original = checkpoint.write_checkpoint
    calls: list[int] = []

    def fill_up(state: Any, final_dir: Path) -> None:
        calls.append(state.global_step)
        if len(calls) > 1:
            raise StorageError(28, "the disk is full")
        original(state, final_dir)

    monkeypatch.setattr("implicit_llm.training.operations.checkpoint_store.write_checkpoint", fill_up)
    with pytest.raises(StorageError, match="the disk is full"):
        train(run_dir, train_config(), data, save_steps=2)
    assert calls == [2, 4, 6]
    assert [path.name for path in (work_of(run_dir) / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_last_save_that_finds_the_disk_full_stops_training(run_dir: Path, data: Path, inject: Inject) -> None:
    with inject("checkpoint.after_model:enospc@1"), pytest.raises(StorageError, match="disk is full"):
        train(run_dir, train_config(), data)


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
    assert found == {"checkpoint", "journal.jsonl", "manifest.json", "model", "provenance.json", "training.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_kernels_that_cannot_run_are_refused(run_dir: Path, data: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="choose torch"):
        train(run_dir, train_config(), data, kernels="triton")


def test_the_status_line_says_where_training_is_and_how_long_it_takes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("implicit_llm.training.operations.status.time.monotonic", lambda: clock.now)
    status = StatusLine("a5/free", logging.getLogger("implicit_llm.train"), bar=False)
    step = 1200
    caplog.set_level(logging.INFO, "implicit_llm.train")
    status.start(step, 2400)
    status.values = {"loss": 0.5, "accuracy_last10": 0.75, "f_evaluations": 11.5, "tokens_per_s": 12345.6, "mfu": 0.41}
    for _ in range(80):
        clock.now += 0.125
        step += 1
        status.update(step)
    lines = [record.message for record in caplog.records]
    assert lines[-1] == (
        "a5/free: step 1280/2400, loss 0.5000, last-10 0.750, f-evaluations 11.5, 12,346 tokens/s, mfu 41.0%, "
        "8.0 steps/s, 2 min 20 s left"
    )
    assert len(lines) == 2  # one every five seconds at first
    for _ in range(3600 * 8):
        clock.now += 0.125
        status.update(step)
    assert 40 < len(caplog.records) < 60  # ever fewer in the hour that follows
    assert " s/step, " in caplog.records[-1].message


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0, 59.4, 65, 3600, 7860)] == ["0 s", "59 s", "1 min 05 s", "1 h 00 min", "2 h 11 min"]
