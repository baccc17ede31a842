from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from implicit_llm.training.metrics import StepMetrics
from implicit_llm_data.shards import IGNORED_LABEL

VOCAB = 5


def logits_of(predictions_BL: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(predictions_BL, VOCAB).float()


def solver_stats(residual: float = 0.02) -> SimpleNamespace:
    return SimpleNamespace(
        num_iter=torch.tensor([3.0, 5.0]),
        residual=torch.tensor([0.01, residual]),
        unconverged_tokens=torch.tensor([0, 6]),
        num_closing=4,
    )


def one_step(metrics: StepMetrics, loss: float, stats: SimpleNamespace | None = None) -> None:
    labels = torch.arange(24).reshape(2, 12) % VOCAB
    metrics.add(torch.tensor(loss), logits_of(labels), labels, stats)
    metrics.close_step(torch.tensor(0.5))


def means(metrics: StepMetrics) -> dict[str, float]:
    metrics.pull()
    return metrics.drain()


def test_accuracy_is_that_of_the_last_ten_tokens_with_a_label() -> None:
    labels = torch.zeros(2, 12, dtype=torch.long)
    predictions = labels.clone()
    predictions[:, :2] = 1  # wrong, but not among the last ten
    predictions[0, 5:10] = 1
    labels[1, 11] = IGNORED_LABEL
    metrics = StepMetrics("word_problem")
    metrics.add(torch.tensor(1.0), logits_of(predictions), labels, None)
    metrics.close_step(torch.tensor(0.5))
    assert means(metrics)["accuracy_last10"] == pytest.approx(14 / 19)


def test_solver_health_is_averaged_over_the_batch_and_the_worst_residual_kept() -> None:
    metrics = StepMetrics("word_problem")
    one_step(metrics, 1.0, solver_stats())
    values = means(metrics)
    assert values["num_iter"] == 4.0
    assert values["f_evaluations"] == 8.0
    assert values["residual"] == pytest.approx(0.02)
    assert values["unconverged_share"] == pytest.approx(6 / 24)


def test_micro_batches_add_up_to_the_loss_of_the_step() -> None:
    metrics = StepMetrics("word_problem")
    labels = torch.zeros(2, 12, dtype=torch.long)
    for loss in (0.25, 0.5):  # each is its share of the loss of the whole batch
        metrics.add(torch.tensor(loss), logits_of(labels), labels, None)
    assert metrics.close_step(torch.tensor(0.5)).tolist() == [0.75, 0.5]
    assert means(metrics) == {"loss": 0.75, "grad_norm": 0.5, "accuracy_last10": 1.0}


def test_what_was_not_measured_is_left_out() -> None:
    explicit, unrolled = StepMetrics("word_problem"), StepMetrics("word_problem")
    one_step(explicit, 1.0)
    one_step(unrolled, 1.0, solver_stats(residual=math.nan))
    assert set(means(explicit)) == {"loss", "grad_norm", "accuracy_last10"}
    assert set(means(unrolled)) == {"loss", "grad_norm", "accuracy_last10", "f_evaluations"}


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


def test_a_stored_state_goes_on_where_it_was() -> None:
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


def test_a_stored_state_with_other_columns_is_left_out() -> None:
    metrics = StepMetrics("word_problem")
    metrics.load_state({"columns": ["loss"], "window": [[1.0]], "recent": [[1.0]], "totals": {"tokens": 3}})
    assert metrics.drain() == {}
    assert metrics.totals.tokens == 3


def test_only_the_last_fifty_steps_are_recent() -> None:
    metrics = StepMetrics("word_problem")
    for step in range(60):
        one_step(metrics, float(step))
    metrics.pull()
    assert metrics.recent()["loss"] == sum(range(10, 60)) / 50
    assert list(metrics.recent_rows()[-1]) == list(metrics.columns)


def test_catbabi_counts_every_labelled_position_over_all_micro_batches() -> None:
    metrics = StepMetrics("catbabi")
    predictions = torch.zeros(1, 12, dtype=torch.long)
    for labels in ([0, 1, 0, *[IGNORED_LABEL] * 9], [1, *[IGNORED_LABEL] * 11], [IGNORED_LABEL] * 12):
        metrics.add(torch.tensor(0.1), logits_of(predictions), torch.tensor([labels]), None)
    metrics.close_step(torch.tensor(0.5))
    values = means(metrics)
    assert values["accuracy"] == pytest.approx(2 / 4)
    assert "accuracy_last10" not in values


def test_a_step_without_any_label_has_no_accuracy_and_spoils_no_mean() -> None:
    metrics = StepMetrics("catbabi")
    predictions = torch.zeros(1, 2, dtype=torch.long)
    for labels in ([IGNORED_LABEL, IGNORED_LABEL], [0, IGNORED_LABEL]):
        metrics.add(torch.tensor(0.1), logits_of(predictions), torch.tensor([labels]), None)
        metrics.close_step(torch.tensor(0.5))
    assert means(metrics)["accuracy"] == 1.0


def test_a_language_model_has_no_accuracy() -> None:
    metrics = StepMetrics("language_model")
    one_step(metrics, 1.0)
    assert means(metrics) == {"loss": 1.0, "grad_norm": 0.5}


def test_the_worst_residual_is_that_of_all_micro_batches() -> None:
    metrics = StepMetrics("language_model")
    labels = torch.zeros(2, 12, dtype=torch.long)
    for residual in (0.02, 0.7, 0.3):
        metrics.add(torch.tensor(0.1), logits_of(labels), labels, solver_stats(residual))
    metrics.close_step(torch.tensor(0.5))
    assert means(metrics)["residual"] == pytest.approx(0.7)


def test_a_mode_gap_is_logged_with_the_steps_around_it_and_is_not_part_of_the_summary() -> None:
    metrics = StepMetrics("language_model")
    for gap in (None, 0.25, None):
        if gap is not None:
            metrics.add_occasional(mode_gap=torch.tensor(gap))
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
