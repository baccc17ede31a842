from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from implicit_llm.training.metrics import StepMetrics
from implicit_llm_data.shards import IGNORED_LABEL

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
    metrics = StepMetrics(task)
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
    metrics = StepMetrics("word_problem")
    for each in stats:
        add(metrics, 1 / len(stats), each)  # its share of the loss of the whole batch
    assert metrics.close_step(torch.tensor(0.5)).tolist() == pytest.approx([1.0, 0.5])
    assert means(metrics) == pytest.approx(MEASURED | expected)


def test_a_loss_that_is_not_finite_is_not_left_out() -> None:
    metrics = StepMetrics("word_problem")
    one_step(metrics, math.nan)
    assert math.isnan(means(metrics)["loss"])


def test_a_drain_takes_the_steps_since_the_last_one() -> None:
    metrics = StepMetrics("word_problem")
    for losses, mean in (([1.0, 2.0], 1.5), ([5.0], 5.0)):
        for loss in losses:
            one_step(metrics, loss)
        assert means(metrics)["loss"] == mean
    assert metrics.drain() == {}
    assert metrics.recent()["loss"] == pytest.approx(8 / 3)


def test_a_stored_state_goes_on_where_it_was_but_for_rows_with_other_columns() -> None:
    metrics, restored = StepMetrics("word_problem"), StepMetrics("word_problem")
    for loss in (0.1, 0.2, 0.3):
        one_step(metrics, loss)
    metrics.pull()
    restored.load_state(json.loads(json.dumps(metrics.state(), allow_nan=False)))
    for each in (metrics, restored):
        one_step(each, 0.7)
        each.pull()
    assert metrics.drain() == restored.drain()
    assert metrics.recent() == restored.recent()
    assert metrics.state() == restored.state()
    metrics.load_state({"columns": ["loss"], "window": [[1.0]], "recent": [[1.0]], "totals": {"tokens": 3}})
    assert (metrics.drain(), metrics.recent(), metrics.totals.tokens) == ({}, {}, 3)


def test_only_the_last_fifty_steps_are_recent() -> None:
    metrics = StepMetrics("word_problem")
    for step in range(60):
        one_step(metrics, float(step))
    metrics.pull()
    assert metrics.recent()["loss"] == sum(range(10, 60)) / 50
    assert list(metrics.recent_rows()[-1]) == list(metrics.columns)


def test_a_mode_gap_is_logged_with_the_steps_around_it_and_is_not_part_of_the_summary() -> None:
    metrics = StepMetrics("language_model")
    for occasional in ({}, {"mode_gap": torch.tensor(0.25)}, {}):
        metrics.add_occasional(occasional)
        one_step(metrics, 1.0, solver_stats())
    assert means(metrics)["mode_gap"] == 0.25
    assert "mode_gap" not in metrics.recent()


class Cost:
    """A step of 10 tokens that costs 2 FLOPs an evaluation, or 1 where none is counted."""

    tokens = 10

    def flops(self, f_evaluations: float) -> float:
        return 1.0 if math.isnan(f_evaluations) else 2 * f_evaluations


def test_tokens_and_flops_add_up_over_phases_and_over_a_stop() -> None:
    metrics = StepMetrics("language_model", Cost())  # type: ignore[arg-type]
    one_step(metrics, 1.0, solver_stats())
    metrics.pull()
    restored = StepMetrics("language_model", Cost())  # type: ignore[arg-type]
    restored.load_state(json.loads(json.dumps(metrics.state())))
    restored.start_phase()
    for each in (metrics, restored):
        one_step(each, 1.0)
        each.pull()
    assert restored.totals == metrics.totals
    assert (restored.totals.tokens, restored.totals.flops) == (20, 2 * 8.0 + 1.0)
