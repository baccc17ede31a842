from typing import Any

import pytest

from implicit_llm_jobs.tracking.mlflow_bridge import Trajectory

NAN = float("nan")


def metrics(step: int, **values: float | None) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time": "2025-01-01T00:00:00+00:00", "values": values}


def rewind(step: int) -> dict[str, Any]:
    return {"kind": "rewind", "step": step, "time": "2025-01-01T00:00:00+00:00"}


def finished(**summary: Any) -> dict[str, Any]:
    return {"kind": "event", "name": "stage_finished", "time": "t", "summary": summary}


FIRST = [metrics(step, loss=float(step)) for step in (1, 2, 3)]
SUMMARY = {
    "metrics": {"loss": 0.5, "by_task": {"a": 1.0}},
    "best_accuracy": {"test": 0.9, "valid": None},
    "accuracy": {"test": {"blockwise": 0.9}},
    "data": {"length": 16},
}
CASES = {
    "equal points after a rewind are left out, and the rest goes on": (
        [metrics(1, loss=1.0), metrics(2, loss=2.0), rewind(1), metrics(2, loss=2.0), metrics(3, loss=3.0)],
        [(0, 1, {"loss": 1.0}), (0, 2, {"loss": 2.0}), (0, 3, {"loss": 3.0})],
    ),
    "what the machine measures may differ, and stays single": (
        [metrics(1, loss=1.0, tokens_per_s=10.0), rewind(0), metrics(1, loss=1.0, tokens_per_s=99.0, memory_mib=5.0)],
        [(0, 1, {"loss": 1.0, "tokens_per_s": 10.0}), (0, 1, {"memory_mib": 5.0})],
    ),
    "a resume that goes another way is a branch from there on": (
        [*FIRST, rewind(0), FIRST[0], metrics(2, loss=2.5), FIRST[2], metrics(4, loss=4.0)],
        [
            *((0, step, {"loss": float(step)}) for step in (1, 2, 3)),
            *((1, step, {"loss": loss}) for step, loss in ((2, 2.5), (3, 3.0), (4, 4.0))),
        ],
    ),
    "a second resume is compared with the branch, and equals it": (
        [metrics(1, loss=1.0), rewind(0), metrics(1, loss=1.5), rewind(0), metrics(1, loss=1.5)],
        [(0, 1, {"loss": 1.0}), (1, 1, {"loss": 1.5})],
    ),
    "a second resume is compared with the branch, and leaves it": (
        [metrics(1, loss=1.0), rewind(0), metrics(1, loss=1.5), rewind(0), metrics(1, loss=1.0)],
        [(0, 1, {"loss": 1.0}), (1, 1, {"loss": 1.5}), (2, 1, {"loss": 1.0})],
    ),
    "two kinds of metrics of one step are both taken": (
        [metrics(1, loss=1.0), metrics(1, accuracy=0.5)],
        [(0, 1, {"loss": 1.0}), (0, 1, {"accuracy": 0.5})],
    ),
    "not a number equals itself": (
        [metrics(1, loss=None), rewind(0), metrics(1, loss=None)],
        [(0, 1, {"loss": pytest.approx(NAN, nan_ok=True)})],
    ),
    "the summary counts once": (
        [finished(loss=0.5, name="x", is_=True)] * 2,
        [(0, 0, {"summary/loss": 0.5})],
    ),
    "of a nested summary metrics and best numbers count": (
        [finished(**SUMMARY)],
        [(0, 0, {"summary/loss": 0.5, "summary/best_accuracy.test": 0.9})],
    ),
}


@pytest.mark.parametrize(("records", "expected"), CASES.values(), ids=CASES)
def test_points_of_a_journal_become_branches(records: list[dict[str, Any]], expected: list[Any]) -> None:
    trajectory = Trajectory()
    points = [trajectory.take(record) for record in records]
    assert [(p.branch, p.point.step, p.point.values) for p in points if p is not None] == expected
