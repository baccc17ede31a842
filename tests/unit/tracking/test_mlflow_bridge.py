"""What MLflow is told of a run: its config, labels and points, each once, whatever stops the telling."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from implicit_llm.training.metrics import StepMetrics
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.tracking import tracked_run
from implicit_llm_jobs.tracking.mlflow_bridge import SECTIONS, Bridge, Trajectory, flatten, in_one_column, mlflow_key
from implicit_llm_jobs.tracking.tracked_run import TrackedRun, in_order, model_labels, works_below
from tests.fault.points import registered
from tests.unit.tracking.small_stages import make_data, make_model, start_invocation, train
from tests.unit.tracking.stored import Stored

TRACKING = Path(tracked_run.__file__).parent


@pytest.fixture
def run(results: Path) -> TrackedRun:
    run_dir = results / "demo" / "train" / "a5-s0" / "free"
    config = {"model": {"hidden_size": 64}, "betas": [0.9, 0.95], "long": "x" * 600, "seed": 0}
    run = TrackedRun(run_dir / "work" / "f00d", "train", "a5-s0/free", "f00d" * 16, config)
    run.work.mkdir(parents=True)
    return run


NAME = "train/a5-s0/free"


def runs(run: TrackedRun) -> list[Any]:
    return [*Stored(run.uri).runs.values()]


def history(run: TrackedRun, key: str = "loss") -> list[tuple[int, float]]:
    return Stored(run.uri).history(NAME, key)


def write(run: TrackedRun, first: int, last: int, scale: float = 1.0, speed: float = 1.0) -> Journal:
    journal = Journal(run.journal)
    for step in range(first, last + 1):
        journal.metrics(step, {"loss": scale / step, "tokens_per_s": speed})
    return journal


def finish(run: TrackedRun) -> None:
    (run.work / "manifest.json").touch()
    Bridge(run).bring()


def test_a_run_carries_its_config_tags_points_and_status(run: TrackedRun, results: Path) -> None:
    write(run, 1, 3).event("stage_finished", summary={"accuracy": 0.75})
    finish(run)
    (found,) = runs(run)
    assert (found.info.run_name, found.info.status) == (NAME, "FINISHED")
    params = {"model.hidden_size": "64", "betas": "[0.9, 0.95]", "long": "x" * 497 + "...", "seed": "0"}
    assert found.data.params == params
    assert found.data.tags.items() >= {
        "stage": "train",
        "name": "a5-s0/free",
        "fingerprint": run.fingerprint,
        "run_dir": "results/demo/train/a5-s0/free",
        "config": "demo",
        "run": "a5",
        "phase": "free",
        "mlflow.note.content": "Its files: `results/demo/train/a5-s0/free`\n\n"
        "Its lineage:\n\n    implicit-llm lineage results/demo/train/a5-s0/free\n",
    }.items()  # fmt: skip
    assert found.info.artifact_uri.startswith((results / "mlflow-artifacts").as_uri())
    assert found.data.metrics["summary/accuracy"] == 0.75
    assert history(run) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    state = json.loads((run.work / "mlflow.json").read_text())
    assert (state["run_id"], state["lines_written"]) == (found.info.run_id, 4)


def test_the_summary_is_that_of_the_attempt_that_was_committed(run: TrackedRun) -> None:
    journal = write(run, 1, 3)
    journal.event("stage_finished", summary={"accuracy": 0.5, "num_steps": 3})
    Bridge(run).bring()  # the job is killed before its commit
    journal.event("stage_started")
    journal.event("stage_finished", summary={"accuracy": 0.75})
    finish(run)
    (found,) = runs(run)
    assert {key: value for key, value in found.data.metrics.items() if "summary" in key} == {"summary/accuracy": 0.75}


def test_points_of_any_number_come_while_the_journal_grows_each_once_and_when_their_line_is_whole(
    run: TrackedRun,
) -> None:
    write(run, 1, 1200)  # more than one call takes
    whole = run.journal.read_bytes()
    run.journal.write_bytes(whole[:-20])
    bridge = Bridge(run)
    for _ in range(2):
        bridge.bring()
    assert [step for step, _ in history(run)] == list(range(1, 1200))
    run.journal.write_bytes(whole)
    bridge.bring()
    assert [step for step, _ in history(run)] == list(range(1, 1201))


def test_a_restart_goes_on_in_the_same_run_and_repeats_no_point(run: TrackedRun) -> None:
    journal = write(run, 1, 4)
    journal.event("stage_preempted")
    Bridge(run).bring()
    assert runs(run)[0].info.status == "SCHEDULED"
    journal.event("stage_started")
    journal.rewind(2)
    write(run, 3, 6, speed=2.0)
    Bridge(run).bring()
    assert runs(run)[0].info.status == "RUNNING"
    finish(run)
    assert len(runs(run)) == 1
    assert history(run) == [(step, 1 / step) for step in range(1, 7)]
    assert history(run, "cost/tokens_per_s") == [(step, 1.0) for step in range(1, 5)] + [(5, 2.0), (6, 2.0)]


@pytest.mark.parametrize("point", [point for point in registered(TRACKING) if point.startswith("tracker.")])
def test_bringing_that_fails_anywhere_is_made_good_by_the_next(
    results: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{results / 'none' / 'mlflow.db'}")
    (results / "none").touch()  # the stages run without a store
    start_invocation(monkeypatch)
    make_model(results, {"data": make_data(results)}, goes_another_way)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    *_, run = in_order(works_below(results))
    faults.reset()
    monkeypatch.setenv("IMPLICIT_LLM_FAULT", f"{point}:raise")
    with pytest.raises(faults.FaultInjected):
        Bridge(run).bring()
    monkeypatch.delenv("IMPLICIT_LLM_FAULT")
    for _ in range(2):
        Bridge(run).bring()
    stored = Stored(results)
    name = "train/s3-implicit-s3/free"
    assert set(stored.runs) == {name}
    assert stored.history(name, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    content = stored.content()[name]
    assert (len(content["inputs"]), content["num_made_models"]) == (1, 1)
    assert len(stored.models()) == 1
    assert {run.info.status for run in stored.runs.values()} == {"FINISHED"}


def goes_another_way(context: StageContext) -> StageResult:
    result = train(context)
    context.journal.rewind(1)
    for step in (2, 3):
        context.journal.metrics(step, {"loss": 2 / step, "tokens_per_s": 1.0})
    return result


def test_another_config_under_the_same_run_is_refused(run: TrackedRun) -> None:
    write(run, 1, 1)
    Bridge(run).bring()
    write(run, 2, 2)
    with pytest.raises(Exception, match="Changing param values is not allowed"):
        Bridge(replace(run, config={"model": {"hidden_size": 128}})).bring()
    assert history(run) == [(1, 1.0)]


def test_a_copied_results_directory_goes_on_in_its_own_store(run: TrackedRun, tmp_path: Path) -> None:
    write(run, 1, 2)
    Bridge(run).bring()
    shutil.copytree(tmp_path / "results", tmp_path / "copy" / "results")
    run_dir = tmp_path / "copy" / "results" / "demo" / "train" / "a5-s0" / "free"
    copy = replace(run, work=run_dir / "work" / "f00d")
    Journal(copy.journal).metrics(3, {"loss": 1 / 3})
    Bridge(copy).bring()
    assert len(history(run)) == 2
    assert [step for step, _ in history(copy)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("run_dir", "stage", "name", "config_dir"),
    [
        ("results/demo/train/a/free", "train", "a/free", "results/demo"),
        ("results/demo/report", "report", "", "results/demo"),
        ("results/demo/report", "report", "report", "results/demo"),
        ("results/by-hand", "train", "a/free", "results"),
    ],
)
def test_the_config_is_found_from_the_run_directory(run_dir: str, stage: str, name: str, config_dir: str) -> None:
    run = TrackedRun(Path(run_dir, "work", "f"), stage, name, "f", {})
    assert run.config_dir == Path(config_dir)


def test_a_run_elsewhere_is_tagged_with_its_whole_path(results: Path) -> None:
    elsewhere = TrackedRun(results.parent / "by-hand" / "work" / "f", "evaluate", "word-problem", "f00d" * 16, {})
    assert elsewhere.tags({})["run_dir"] == (results.parent / "by-hand").as_posix()


def test_a_config_becomes_dotted_keys_that_mlflow_takes() -> None:
    assert flatten({"a": {"b": None, "c": {}}, "d@e": True, "f": "text"}) == {
        "a.b": "null",
        "a.c": "{}",
        "d_e": "true",
        "f": "text",
    }


def test_params_and_tags_stay_below_the_limits_of_mlflow(run: TrackedRun) -> None:
    Journal(run.journal).metrics(1, {f"accuracy@{'x' * 400}=1": 1.0})
    config = {f"{'key' * 100}{number}": "x" * 10_000 for number in range(3)} | {str(n): n for n in range(300)}
    Journal(run.journal).event("stage_started", commit="c" * 10_000)
    many = replace(run, config={"a": {"b": config}})
    finish(many)
    data = runs(many)[0].data
    assert len(data.params) == 301, "300 short keys, and the long ones, whose first 250 characters are the same"
    assert max(len(key) for key in data.params) == 250
    assert max(len(value) for value in data.params.values()) == 500
    assert len(data.tags["mlflow.source.git.commit"]) == 5000
    assert len(data.metrics) == 1


LLAMA = {"model_type": "implicit_llama3", "is_implicit": False, "num_hidden_layers": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("stage", "name", "config", "summary", "expected"),
    [
        (
            "train",
            "mamba2-1.3b-implicit-s1/free-80",
            {"task": "language_model", "seed": 1, "model": {"model_type": "implicit_mamba2", "is_implicit": True}},
            {},
            {"task": "language_model", "family": "mamba2", "run": "mamba2-1.3b-implicit", "seed": "1"}
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
            {"family": "mamba2", "run": "mamba2-130m-300b", "phase": "checkpoint"} | {"is_implicit": "false"},
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
    Manifest.of(trained, (), {}).write(tmp_path / "train" / "manifest.json")
    run = TrackedRun(tmp_path / "evaluate", "evaluate", "e", "0", {"kind": "perplexity"})
    Journal(run.journal).event("stage_started", inputs={"model": "../train"})
    found = run.labels()
    assert found == model_labels("train", trained.name, config, {}) | {"task": "perplexity"}
    assert found["family"] == "llama3"


@pytest.mark.parametrize(
    ("stage", "config", "labels"), [("data", {"kind": "tokenizer"}, {"task": "tokenizer"}), ("report", {}, {})]
)
def test_data_and_reports_are_labelled_by_their_kind(
    tmp_path: Path, stage: str, config: dict[str, Any], labels: dict[str, str]
) -> None:
    assert TrackedRun(tmp_path, stage, "n", "0", config).labels() == labels


@pytest.mark.parametrize("task", list(TASKS))
def test_every_metric_of_training_is_in_the_list(task: str) -> None:
    assert set(StepMetrics(TASKS[task]).columns) <= METRICS.keys()


def test_an_explicit_and_an_implicit_model_are_compared_in_one_column_of_a_table(results: Path) -> None:
    modes = [{"name": "block wise"}, {"name": "sequential"}]
    numbers = {"explicit": {"acc.a5-h0.5.parallel": 0.5}, "implicit": {"acc.a5-h0.5.block-wise": 1.0}}
    numbers["implicit"]["acc.a5-h0.5.sequential"] = 0.9
    for name, values in numbers.items():
        config = {"kind": "word_problem", "modes": modes}
        work = results / "demo" / "evaluate" / name / "work" / name
        run = TrackedRun(work, "evaluate", name, name * 8, config)
        run.work.mkdir(parents=True)
        Journal(run.journal).metrics(1, values)
        finish(run)
    found = {item.info.run_name: item.data.metrics for item in runs(run)}
    column = {name: metrics["evaluation/acc.a5-h0.5"] for name, metrics in found.items()}
    assert column == {"evaluate/explicit": 0.5, "evaluate/implicit": 1.0}
    assert found["evaluate/implicit"].keys() >= {
        "evaluation/acc.a5-h0.5.block-wise",
        "evaluation/acc.a5-h0.5.sequential",
    }
    swept = {"acc.a5.block-wise.eval_tol-0.2": 1.0}
    assert in_one_column(swept, {"modes": modes, "sweep": {"eval_tol": [0.2]}}) == swept


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


def metrics(step: int, **values: float | None) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time": "2025-01-01T00:00:00+00:00", "values": values}


def rewind(step: int) -> dict[str, Any]:
    return {"kind": "rewind", "step": step, "time": "2025-01-01T00:00:00+00:00"}


def finished(**summary: Any) -> dict[str, Any]:
    return {"kind": "event", "name": "stage_finished", "time": "t", "summary": summary}


SUMMARY = {
    "metrics": {"loss": 0.5, "by_task": {"a": 1.0}},
    "best_accuracy": {"test": 0.9, "valid": None},
    "accuracy": {"test": {"blockwise": 0.9}},
    "data": {"length": 16},
}
CASES = {
    "steps that are trained again after a rewind are left out, and the rest goes on": (
        [metrics(1, loss=1.0), metrics(2, loss=2.0), rewind(1), metrics(2, loss=2.5), metrics(3, loss=3.0)],
        [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})],
    ),
    "two kinds of metrics of one step are both taken": (
        [metrics(1, loss=1.0), metrics(1, accuracy=0.5)],
        [(1, {"loss": 1.0}), (1, {"accuracy": 0.5})],
    ),
}


@pytest.mark.parametrize(("records", "expected"), CASES.values(), ids=CASES)
def test_each_point_of_a_journal_is_taken_once(records: list[dict[str, Any]], expected: list[Any]) -> None:
    trajectory = Trajectory()
    points = [trajectory.take(record) for record in records]
    assert [(point.step, point.values) for point in points if point is not None] == expected


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"loss": 0.5, "name": "x", "is_": True}, {"summary/loss": 0.5}),
        (SUMMARY, {"summary/loss": 0.5, "summary/best_accuracy.test": 0.9}),
    ],
)
def test_the_numbers_of_a_summary_its_metrics_and_its_best_numbers_count(
    summary: dict[str, Any], expected: dict[str, float]
) -> None:
    trajectory = Trajectory()
    assert trajectory.take(finished(**summary)) is None
    assert trajectory.summary is not None
    assert (trajectory.summary.step, trajectory.summary.values) == (0, expected)
