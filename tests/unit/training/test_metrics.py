"""What is told of a step, metrics, rates and the line of status, and what is watched of the solver while it trains."""

import json
import logging
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.nn.functional import cross_entropy

from implicit_llm.models.mamba2.model import ImplicitMamba2Model
from implicit_llm.training import loop
from implicit_llm.training.metrics import (
    OCCASIONAL,
    RADIUS_SEQUENCES,
    SEQUENCES,
    StepMetrics,
    Totals,
    is_due,
    look_at_fixed_point,
)
from implicit_llm.training.operations import status
from implicit_llm.training.operations.status import SolverAlarm, SpeedMeter, peak_flops, shown
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.runs.journal import Journal, read_records
from implicit_llm_data.shards import IGNORED_LABEL
from implicit_llm_jobs.progress import ProgressLog
from tests.unit.training.small_runs import (
    FREE,
    IMPLICIT,
    LLAMA,
    UNROLLED,
    artifacts,
    events,
    logged,
    make_model,
    train,
    train_config,
)

NAN = float("nan")
HARD = {"mode": "fixed_point", "max_iter": 1, "tol": 1e-6, "phantom_steps": 1}


def rows(count: int, share: float, residual: float = 0.01) -> list[dict[str, float]]:
    return [{"unconverged_share": share, "residual": residual}] * count


@pytest.fixture
def alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SolverAlarm:
    monkeypatch.setattr(status, "ALARM_STEPS", 10)
    return SolverAlarm(Journal(tmp_path / "journal.jsonl"))


def alarms(tmp_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(tmp_path / "journal.jsonl") if record.get("name") == "solver_alarm"]


def test_an_alarm_is_an_event_and_a_warning_of_one_line(
    alarm: SolverAlarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alarm.observe(10, rows(10, 0.95))
    (event,), (record,) = alarms(tmp_path), caplog.records
    assert event["unconverged_share"] == pytest.approx(0.95)
    assert event["window_steps"] == 10
    assert "residual" not in event
    assert record.levelno == logging.WARNING
    assert re.fullmatch(r".*unconverged_share is 0\.95 \(limit 0\.9\).*", record.message)


@pytest.mark.parametrize(
    ("observed", "alarmed"),
    [
        ([(9, rows(9, 0.95)), (10, rows(1, 0.95))], [10]),  # a whole window
        ([(24, rows(10, 0.1) + rows(4, 0.95) + rows(10, 0.1))], []),
        ([(20, rows(20, NAN, NAN))], []),  # explicit or unrolled
        ([(10, rows(10, 0.0, residual=0.9))], [10]),
        ([(step, rows(10, 0.95)) for step in range(10, 2000, 10)], [10, 110, 310, 710, 1510]),
    ],
    ids=["all the time", "for a while", "not measured", "residual", "repeated now and then"],
)
def test_an_alarm_needs_a_whole_window_above_a_limit(
    alarm: SolverAlarm, tmp_path: Path, observed: list[tuple[int, list]], alarmed: list[int]
) -> None:
    for step, of_steps in observed:
        alarm.observe(step, of_steps)
    assert [event["step"] for event in alarms(tmp_path)] == alarmed


def test_training_alarms_and_goes_on(run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ALARM_STEPS", 4)
    train(run_dir, train_config(phase={"solver": HARD}), data, log_every_steps=3)
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
    model = make_model(IMPLICIT, solver=FREE).train()
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

    def radius(row: int) -> torch.Tensor:
        of_row, z_LD = x.select(torch.tensor([row])), evaluated.last_hidden_state[row]
        jacobian_LDLD = jacobian(lambda z_LD: model.base.apply_stack(z_LD[None], of_row)[0][0], z_LD)
        return torch.linalg.eigvals(jacobian_LDLD.diagonal(dim1=0, dim2=2).movedim(-1, 0)).abs().max()

    exact = [radius(row) for row in range(RADIUS_SEQUENCES)]
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


VOCAB = 5
LABELS_BL = torch.arange(24).reshape(2, 12) % VOCAB
MEASURED = {"loss": 1.0, "grad_norm": 0.5, "accuracy_last10": 1.0}


def solver_stats(residual: float = 0.02) -> SimpleNamespace:
    return SimpleNamespace(
        num_iter=torch.tensor([3.0, 5.0]),
        residual=torch.tensor([0.01, residual]),
        unconverged_tokens=torch.tensor([0, 6]),
        num_closing=4,
    )


def add(metrics: StepMetrics, loss: float, stats: SimpleNamespace | None, labels_BL: torch.Tensor = LABELS_BL) -> None:
    """A micro-batch with these labels, of which LABELS_BL are predicted right, and in other ones all that are 0."""
    predictions_BL = labels_BL if labels_BL is LABELS_BL else torch.zeros_like(labels_BL)
    metrics.add(torch.tensor(loss), torch.nn.functional.one_hot(predictions_BL, VOCAB).float(), labels_BL, stats)


def one_step(metrics: StepMetrics, loss: float, stats: SimpleNamespace | None = None) -> None:
    add(metrics, loss, stats)
    metrics.close_step(torch.tensor(0.5))


def means(metrics: StepMetrics) -> dict[str, float]:
    metrics.pull()
    return metrics.drain()


def row(*labels: int) -> torch.Tensor:
    """So many labels, then positions without one."""
    return torch.tensor([[*labels, *[IGNORED_LABEL] * (12 - len(labels))]])


@pytest.mark.parametrize(
    ("task", "steps", "accuracy"),
    [
        # Of the last ten tokens of the two rows one has no label, and five are wrong.
        ("word_problem", [[torch.cat([row(1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0), row(1, 1, *[0] * 9)])]], 14 / 19),
        ("catbabi", [[row(0, 1, 0), row(1), row()]], 2 / 4),  # of every label, over all micro-batches
        ("catbabi", [[row()], [row(0)]], 1.0),  # a step without any label spoils no mean
        ("language_model", [[row(0)]], None),
    ],
)
def test_accuracy_is_that_of_the_task(task: str, steps: list[list[torch.Tensor]], accuracy: float | None) -> None:
    metrics = StepMetrics(TASKS[task])
    for labels in steps:
        for labels_BL in labels:
            add(metrics, 1.0, None, labels_BL)
        metrics.close_step(torch.tensor(0.5))
    name = "accuracy_last10" if task == "word_problem" else "accuracy"
    found = {key: value for key, value in means(metrics).items() if key.startswith("accuracy")}
    assert found == ({} if accuracy is None else {name: pytest.approx(accuracy)})


HEALTH = {"num_iter": 4.0, "f_evaluations": 8.0, "residual": 0.02, "unconverged_share": 6 / 24}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ([solver_stats()], HEALTH),
        ([solver_stats(0.02), solver_stats(0.7), solver_stats(0.3)], HEALTH | {"residual": 0.7}),  # the worst
        ([None], {}),  # explicit
        ([solver_stats(math.nan)], {"f_evaluations": 8.0}),  # unrolled
    ],
)
def test_micro_batches_add_up_to_the_loss_and_to_the_health_of_the_solver(
    stats: list[SimpleNamespace | None], expected: dict[str, float]
) -> None:
    metrics = StepMetrics(TASKS["word_problem"])
    for each in stats:
        add(metrics, 1 / len(stats), each)  # its share of the loss of the whole batch
    assert metrics.close_step(torch.tensor(0.5)).tolist() == pytest.approx([1.0, 0.5])
    assert means(metrics) == pytest.approx(MEASURED | expected)


def test_a_loss_that_is_not_finite_is_not_left_out() -> None:
    metrics = StepMetrics(TASKS["word_problem"])
    one_step(metrics, math.nan)
    assert math.isnan(means(metrics)["loss"])


def test_a_drain_takes_the_steps_since_the_last_one() -> None:
    metrics = StepMetrics(TASKS["word_problem"])
    for losses, mean in (([1.0, 2.0], 1.5), ([5.0], 5.0)):
        for loss in losses:
            one_step(metrics, loss)
        assert means(metrics)["loss"] == mean
    assert metrics.drain() == {}
    assert metrics.recent()["loss"] == pytest.approx(8 / 3)


def test_only_the_last_fifty_steps_are_recent() -> None:
    metrics = StepMetrics(TASKS["word_problem"])
    for step in range(60):
        one_step(metrics, float(step))
    metrics.pull()
    assert metrics.recent()["loss"] == sum(range(10, 60)) / 50
    assert metrics.recent_rows()[-1] == {"loss": 59.0, "grad_norm": 0.5, "accuracy_last10": 1.0}


def test_a_mode_gap_is_logged_with_the_steps_around_it_and_is_not_part_of_the_summary() -> None:
    metrics = StepMetrics(TASKS["language_model"])
    for occasional in ({}, {"mode_gap": torch.tensor(0.25)}, {}):
        metrics.add_occasional(occasional)
        one_step(metrics, 1.0, solver_stats())
    assert means(metrics)["mode_gap"] == 0.25
    assert "mode_gap" not in metrics.recent()


def test_tokens_and_flops_add_up_over_phases_and_over_a_stop() -> None:
    """Steps of 10 tokens, each of which costs 2 FLOPs an evaluation, or 1 where none is counted."""
    before, after = (
        StepMetrics(TASKS["language_model"], 10, lambda number: 1.0 if math.isnan(number) else 2 * number)
        for _ in range(2)
    )
    one_step(before, 1.0, solver_stats())
    before.pull()
    after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
    after.start_phase()
    one_step(after, 1.0)
    after.pull()
    assert (after.totals.tokens, after.totals.flops) == (20, 10 * (2 * 8.0 + 1.0))


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "fp32", 15.7),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
    ],
)
def test_the_peak_of_a_device(name: str, precision: str, tera: float | None) -> None:
    assert peak_flops(name, precision) == (None if tera is None else pytest.approx(tera * 1e12))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


def test_rates_are_since_the_last_report(clock: SimpleNamespace) -> None:
    meter = SpeedMeter("bf16", torch.device("cpu"), 1)
    meter.start(Totals(tokens=1000, flops=5e9))
    clock.now += 2.0
    assert meter.read(Totals(tokens=1500, flops=9e9)) == {"tokens_per_s": 250.0, "flops_per_s": 2e9}
    clock.now += 1.0
    assert meter.read(Totals(tokens=1600, flops=9e9)) == {"tokens_per_s": 100.0, "flops_per_s": 0.0}


def test_utilisation_is_a_share_of_the_peak_of_all_devices(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(get_device_name=lambda device: "NVIDIA H200", max_memory_allocated=lambda device: 3 * 2**30)
    monkeypatch.setattr("implicit_llm.training.operations.status.torch.cuda", cuda)
    meter = SpeedMeter("bf16", torch.device("cuda", 0), 4)
    meter.start(Totals())
    clock.now += 1.0
    values = meter.read(Totals(tokens=1, flops=4 * 989.4e12 * 0.3))
    assert (values["mfu"], values["memory_gib"]) == pytest.approx((0.3, 3.0))


def test_lines_say_where_training_is_and_how_long_it_takes(
    caplog: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    values = {"loss": 0.5, "accuracy_last10": 0.75, "f_evaluations": 11.5, "tokens_per_s": 12345.6, "mfu": 0.41}
    caplog.set_level(logging.INFO, "implicit_llm_jobs.progress")
    progress = ProgressLog("a5/free", "step", 2400, 1200, "lines")
    for step in range(1201, 1281):
        clock.now += 0.125
        progress.tell(step, lambda: shown(values))
    lines = [record.message for record in caplog.records]
    assert lines[-1] == (
        "a5/free: step 1280/2400, loss 0.5000, last-10 0.750, f-evaluations 11.5, tokens/s 12,346, mfu 41.0%, "
        "8.00step/s, 02:20 left"
    )
    assert len(lines) == 2  # one every five seconds at first
    for _ in range(3600 * 8):
        clock.now += 0.125
        progress.tell(1280, lambda: shown(values))
    assert 40 < len(caplog.records) < 60  # ever fewer in the hour that follows
    assert "s/step, " in caplog.records[-1].message
