from __future__ import annotations

import math
from typing import Any

from implicit_llm_jobs.tracking.trajectory import Trajectory


def metrics(step: int, **values: float | None) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time": "2025-01-01T00:00:00+00:00", "values": values}


def rewind(step: int) -> dict[str, Any]:
    return {"kind": "rewind", "step": step, "time": "2025-01-01T00:00:00+00:00"}


def taken(*records: dict[str, Any]) -> list[tuple[int, int, dict[str, float]]]:
    trajectory = Trajectory()
    points = [trajectory.take(record) for record in records]
    return [(point.branch, point.point.step, point.point.values) for point in points if point is not None]


def test_equal_points_after_a_rewind_are_left_out_and_the_rest_goes_on() -> None:
    assert taken(metrics(1, loss=1.0), metrics(2, loss=2.0), rewind(1), metrics(2, loss=2.0), metrics(3, loss=3.0)) == [
        (0, 1, {"loss": 1.0}),
        (0, 2, {"loss": 2.0}),
        (0, 3, {"loss": 3.0}),
    ]


def test_what_the_machine_measures_may_differ_and_stays_single() -> None:
    assert taken(
        metrics(1, loss=1.0, tokens_per_s=10.0), rewind(0), metrics(1, loss=1.0, tokens_per_s=99.0, memory_mib=5.0)
    ) == [(0, 1, {"loss": 1.0, "tokens_per_s": 10.0}), (0, 1, {"memory_mib": 5.0})]


def test_a_resume_that_goes_another_way_is_a_branch_from_there_on() -> None:
    records = [metrics(step, loss=float(step)) for step in (1, 2, 3)]
    other = [metrics(1, loss=1.0), metrics(2, loss=2.5), metrics(3, loss=3.0), metrics(4, loss=4.0)]
    assert taken(*records, rewind(0), *other)[3:] == [
        (1, 2, {"loss": 2.5}),
        (1, 3, {"loss": 3.0}),
        (1, 4, {"loss": 4.0}),
    ]


def test_a_second_resume_is_compared_with_the_branch() -> None:
    records = [metrics(1, loss=1.0), rewind(0), metrics(1, loss=1.5), rewind(0)]
    assert taken(*records, metrics(1, loss=1.5))[2:] == []
    assert taken(*records, metrics(1, loss=1.0))[2:] == [(2, 1, {"loss": 1.0})]


def test_two_kinds_of_metrics_of_one_step_are_both_taken() -> None:
    assert taken(metrics(1, loss=1.0), metrics(1, accuracy=0.5)) == [(0, 1, {"loss": 1.0}), (0, 1, {"accuracy": 0.5})]


def test_not_a_number_equals_itself() -> None:
    points = taken(metrics(1, loss=None), rewind(0), metrics(1, loss=None))
    assert len(points) == 1
    assert math.isnan(points[0][2]["loss"])


def test_the_summary_counts_once() -> None:
    finished = {
        "kind": "event",
        "name": "stage_finished",
        "time": "t",
        "summary": {"loss": 0.5, "name": "x", "is": True},
    }
    assert taken(finished, finished) == [(0, 0, {"summary/loss": 0.5})]


def test_of_a_nested_summary_metrics_and_best_numbers_count() -> None:
    summary = {
        "metrics": {"loss": 0.5, "by_task": {"a": 1.0}},
        "best_accuracy": {"test": 0.9, "valid": None},
        "accuracy": {"test": {"blockwise": 0.9}},
        "data": {"length": 16},
    }
    finished = {"kind": "event", "name": "stage_finished", "time": "t", "summary": summary}
    assert taken(finished) == [(0, 0, {"summary/loss": 0.5, "summary/best_accuracy.test": 0.9})]
