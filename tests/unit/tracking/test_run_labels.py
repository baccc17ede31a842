"""What MLflow is told of a run: its labels, the names of its metrics, and its points in branches."""

from pathlib import Path
from typing import Any

import pytest

from implicit_llm.training.metrics import StepMetrics
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_jobs.tracking.mlflow_bridge import SECTIONS, TRAINING, Trajectory, mlflow_key
from implicit_llm_jobs.tracking.tracked_run import TrackedInput, TrackedRun, model_labels

LLAMA = {"model_type": "implicit_llama3", "is_implicit": False, "num_hidden_layers": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("stage", "name", "config", "summary", "expected"),
    [
        (
            "train",
            "mamba2-1.3b-implicit-s1/free-80",
            {"task": "language_model", "seed": 1, "model": {"model_type": "implicit_mamba2", "is_implicit": True}},
            {},
            {"task": "language_model", "family": "mamba2", "size": "1.3b", "run": "mamba2-1.3b-implicit", "seed": "1"}
            | {"phase": "free-80", "is_implicit": "true"},
        ),
        (
            "train",
            "text-s0/explicit",
            {"task": "language_model", "seed": 0, "model": LLAMA},
            {},
            {"task": "language_model", "family": "llama3", "size": "12x768", "run": "text", "phase": "explicit"}
            | {"seed": "0", "is_implicit": "false"},
        ),
        (
            "checkpoint",
            "mamba2-130m-300b",
            {"hub": "state-spaces/mamba2-130m"},
            {"model_type": "mamba2"},
            {"family": "mamba2", "size": "130m", "run": "mamba2-130m-300b", "phase": "checkpoint"}
            | {"is_implicit": "false"},
        ),
        (
            "train",
            "mine-s0/explicit",
            {"task": "catbabi", "model": {"pretrained": "gpt2"}, "seed": 0},
            {},
            {"task": "catbabi", "run": "mine", "phase": "explicit", "seed": "0"},
        ),
    ],
)
def test_a_run_is_labelled_by_what_its_name_and_config_tell(
    stage: str, name: str, config: dict[str, Any], summary: dict[str, Any], expected: dict[str, str]
) -> None:
    assert model_labels(stage, name, config, summary) == expected


def test_an_evaluation_has_the_labels_of_its_model_and_its_own_kind(tmp_path: Path) -> None:
    config = {"task": "language_model", "model": {"model_type": "implicit_llama3", "is_implicit": True}, "seed": 0}
    trained = Identity("train", "llama3-130m-s0/free", config, "c0de", {})
    given = TrackedInput(tmp_path, trained.fingerprint)
    Manifest.of(trained, (), {}).write(given.work / "manifest.json")
    found = TrackedRun(tmp_path, tmp_path, "evaluate", "e", "0", {"kind": "perplexity"}, {"model": given}).labels()
    assert found == model_labels("train", trained.name, config, {}) | {"task": "perplexity"}
    assert found["family"] == "llama3"


@pytest.mark.parametrize(
    ("stage", "config", "labels"), [("data", {"kind": "tokenizer"}, {"task": "tokenizer"}), ("report", {}, {})]
)
def test_data_and_reports_are_labelled_by_their_kind(
    tmp_path: Path, stage: str, config: dict[str, Any], labels: dict[str, str]
) -> None:
    assert TrackedRun(tmp_path, tmp_path, stage, "n", "0", config).labels() == labels


@pytest.mark.parametrize("task", list(TASKS))
def test_every_metric_of_training_is_in_the_list(task: str) -> None:
    assert set(StepMetrics(task).columns) <= {key for section in TRAINING.values() for key in section}


@pytest.mark.parametrize(
    ("stage", "key", "expected"),
    [
        ("train", "loss", "loss"),
        ("train", "residual", "solver/residual"),
        ("train", "mfu", "cost/mfu"),
        ("train", "something_new", "something_new"),
        ("train", "summary/loss", "summary/loss"),
        ("evaluate", "residual.trained", "evaluation/residual.trained"),
        ("evaluate", "acc.task.blockwise@eval_tol=0.2", "evaluation/acc.task.blockwise.eval_tol-0.2"),
        ("data", "tokens", "data/tokens"),
        ("report", "pages", "pages"),
    ],
)
def test_keys_stand_in_the_section_of_their_stage(stage: str, key: str, expected: str) -> None:
    assert mlflow_key(stage, key) == expected
    assert mlflow_key(stage, expected) == expected or stage in SECTIONS


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
