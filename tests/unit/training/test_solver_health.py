"""What is watched of the solver while it trains: the alarm, and the gap between training and evaluation mode."""

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from implicit_llm.models.backbone import ImplicitMamba2Model
from implicit_llm.training import loop
from implicit_llm.training.metrics import OCCASIONAL
from implicit_llm.training.mode_gap import RADIUS_SEQUENCES, SEQUENCES, is_due, look_at_fixed_point
from implicit_llm.training.operations.solver_alarm import SolverAlarm
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs.journal import Journal, read_events
from implicit_llm_data.shards import IGNORED_LABEL
from tests.unit.training.small_runs import (
    FREE,
    IMPLICIT,
    LLAMA,
    UNROLLED,
    artifacts,
    events,
    logged,
    train,
    train_config,
)

NAN = float("nan")
HARD = {"mode": "fixed_point", "max_iter": 1, "tol": 1e-6, "phantom_steps": 1}


def rows(count: int, share: float, residual: float = 0.01) -> list[dict[str, float]]:
    return [{"unconverged_share": share, "residual": residual}] * count


@pytest.fixture
def alarm(tmp_path: Path) -> SolverAlarm:
    return SolverAlarm(Runtime(alarm_window_steps=10, alarm_unconverged_share=0.8), Journal(tmp_path / "journal.jsonl"))


def alarms(tmp_path: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(tmp_path / "journal.jsonl") if event["name"] == "solver_alarm"]


def test_an_alarm_is_an_event_and_a_warning_of_one_line(
    alarm: SolverAlarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alarm.observe(10, rows(10, 0.9))
    (event,), (record,) = alarms(tmp_path), caplog.records
    assert event["unconverged_share"] == pytest.approx(0.9)
    assert event["window_steps"] == 10
    assert "residual" not in event
    assert record.levelno == logging.WARNING
    assert re.fullmatch(r".*unconverged_share is 0\.9 \(limit 0\.8\).*", record.message)


@pytest.mark.parametrize(
    ("observed", "alarmed"),
    [
        ([(9, rows(9, 0.9)), (10, rows(1, 0.9))], [10]),  # a whole window
        ([(24, rows(10, 0.1) + rows(4, 0.9) + rows(10, 0.1))], []),
        ([(20, rows(20, NAN, NAN))], []),  # explicit or unrolled
        ([(10, rows(10, 0.0, residual=0.9))], [10]),
        ([(step, rows(10, 0.9)) for step in range(10, 2000, 10)], [10, 110, 310, 710, 1510]),
    ],
    ids=["all the time", "for a while", "not measured", "residual", "repeated now and then"],
)
def test_an_alarm_needs_a_whole_window_above_a_limit(
    alarm: SolverAlarm, tmp_path: Path, observed: list[tuple[int, list]], alarmed: list[int]
) -> None:
    for step, of_steps in observed:
        alarm.observe(step, of_steps)
    assert [event["step"] for event in alarms(tmp_path)] == alarmed


def test_alarms_that_are_switched_off_are_silent(tmp_path: Path) -> None:
    silent = Runtime(alarm_window_steps=10, alarm_unconverged_share=None, alarm_residual=None)
    SolverAlarm(silent, Journal(tmp_path / "journal.jsonl")).observe(20, rows(20, 1.0, 9.0))
    assert alarms(tmp_path) == []


def test_training_alarms_and_goes_on(run_dir: Path, data: Path) -> None:
    train(run_dir, train_config(phase={"solver": HARD}), data, alarm_window_steps=4, log_every_steps=3)
    assert [event["step"] for event in events(run_dir, "solver_alarm")] == [6]
    assert (run_dir / "manifest.json").exists()


@pytest.mark.parametrize("solver", [FREE, UNROLLED])
def test_looking_at_mode_gap_and_spectral_radius_changes_nothing(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, solver: dict[str, Any]
) -> None:
    found = {}
    for name, due in (("never", False), ("always", True)):
        monkeypatch.setattr(loop, "is_due", lambda step, total_steps, due=due: due)
        run_dir = tmp_path / name / "only"
        train(run_dir, train_config(phase={"solver": solver, "end_step": 3}), data, micro_batch_size=4)
        digests = artifacts(run_dir)
        found[name] = {file: digests[file] for file in digests if file.endswith((".safetensors", "training.json"))}
        for key in OCCASIONAL:
            assert all((key in values) == due for _, values in logged(run_dir))
    assert len(found["never"]) == 5
    assert found["never"] == found["always"]


def test_gap_and_radius_are_those_of_the_first_sequences_at_the_fixed_point_of_evaluation() -> None:
    """The gap: loss in evaluation less that in training. The radius: a mean over sequences of the largest token's."""
    torch.manual_seed(0)
    fields = {key: value for key, value in IMPLICIT.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("implicit_mamba2", **fields, solver=FREE)).train()
    ids_BL, labels_BL = torch.randint(6, (SEQUENCES + 3, 12)), torch.randint(6, (SEQUENCES + 3, 12))
    labels_BL[:, ::3] = IGNORED_LABEL
    outputs = model(ids_BL)
    before = torch.get_rng_state()
    found = look_at_fixed_point(model, {"input_ids": ids_BL, "labels": labels_BL}, outputs, nullcontext())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    with torch.no_grad():
        evaluated = model.eval()(ids_BL[:SEQUENCES])
        x = model.base.stack_input(model.get_input_embeddings()(ids_BL[:SEQUENCES]), None, None, None)
    is_counted_BL = labels_BL[:SEQUENCES] != IGNORED_LABEL
    counted = labels_BL[:SEQUENCES][is_counted_BL]
    in_evaluation, in_training = (
        cross_entropy(of.logits[:SEQUENCES][is_counted_BL], counted) for of in (evaluated, outputs)
    )
    gap = (in_evaluation - in_training).item()
    assert found["mode_gap"].item() == pytest.approx(gap, rel=1e-3)
    assert abs(gap) > 1e-5
    exact = []
    for row in range(RADIUS_SEQUENCES):
        of_row = x.select(torch.tensor([row]))

        def f(z_LD: torch.Tensor, of_row: Any = of_row) -> torch.Tensor:
            return model.base.apply_stack(z_LD[None], of_row)[0][0]

        jacobian_LDLD = torch.autograd.functional.jacobian(f, evaluated.last_hidden_state[row])
        blocks_LDD = torch.stack([jacobian_LDLD[token, :, token] for token in range(12)])
        exact.append(torch.linalg.eigvals(blocks_LDD).abs().max())
    assert found["spectral_radius"].item() == pytest.approx(torch.stack(exact).mean().item(), rel=0.05)


@pytest.mark.parametrize("model", [IMPLICIT, LLAMA])
def test_a_model_without_a_solver_or_whose_fixed_point_is_not_finite_has_neither_gap_nor_radius(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    forward = ImplicitMamba2Model.forward

    def diverging(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        if not self.training:
            raise FloatingPointError("not finite")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(ImplicitMamba2Model, "forward", diverging)
    monkeypatch.setattr(loop, "is_due", lambda step, total_steps: True)
    train(run_dir, train_config(model), data)
    points = logged(run_dir)
    assert points
    assert [key for _, values in points for key in OCCASIONAL if key in values] == []


def test_the_gap_is_measured_about_ten_times_in_a_curriculum() -> None:
    for total in (8, 100, 2400, 197_411):
        assert sum(is_due(step, total) for step in range(1, total + 1)) in range(1, 12)
