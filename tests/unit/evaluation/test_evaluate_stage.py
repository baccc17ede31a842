"""The stage in its frame, with a small data set of S3 and untrained models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from implicit_llm.evaluation.answers import EvaluationJob
from implicit_llm.evaluation.inputs import EvaluateInputError
from implicit_llm.evaluation.kinds import word_problem as stage
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import InputMissing
from implicit_llm_data.stages import word_problem as data_stage
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation.finished_runs import records, request, train_nothing
from tests.unit.workflow.console_calls import run

LENGTHS = (12, 24)
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3, "max_samples": 5},
    {"name": "published", "eval_mode": "simultaneous", "eval_max_iter": 3},
]


def data_config(split: str, length: int) -> dict[str, Any]:
    return {
        "kind": "word_problem", "group": "S3", "monoid": "none", "hard_fraction": 0.5,
        "length": length, "num_samples": 9, "split": split, "seed": 0, "shard_samples": 4,
    }  # fmt: skip


@pytest.fixture(scope="module")
def tests_by_role(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    roles = {f"s3-test-L{length}-h0.5": length for length in LENGTHS}
    for role, length in roles.items():
        run_stage(request(folder / role, "data", role, data_config("test", length), {}), data_stage.run)
    return {role: folder / role for role in reversed(roles)}


def train(folder: Path, kind: str) -> Path:
    return train_nothing(folder, kind, "s3", 6, {"data": data_config("train", 12)})


def evaluate(folder: Path, inputs: dict[str, Path], modes: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    run_dir = folder / "evaluate"
    config = {"kind": "word_problem", "modes": MODES if modes is None else modes, **settings}
    run_stage(request(run_dir, "evaluate", "s3-s7/free/word-problem", config, inputs), stage.run)
    return run_dir


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, tests_by_role: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return evaluate(folder, {"model": train(folder, "implicit"), **tests_by_role})


def test_every_data_set_is_evaluated_in_every_mode_shortest_first(implicit_run: Path) -> None:
    found = [(record["length"], record["mode"]) for record in records(implicit_run)]
    assert found == [(length, mode["name"]) for length in LENGTHS for mode in MODES]


def test_records_say_what_was_measured_on_what_and_how_it_was_trained(implicit_run: Path) -> None:
    record = records(implicit_run)[0]
    expected = {"run": "s3-implicit", "seed": 7, "phase": "free", "group": "S3", "monoid": "none", "hard_fraction": 0.5}
    expected |= {"train_length": 12, "train_hard_fraction": 0.5, "is_implicit": True, "num_layers": 1, "num_samples": 9}
    assert {key: record[key] for key in expected} == expected
    assert len(record["accuracy_per_position"]) == 12
    assert 1 < record["f_evaluations_per_token"] <= 4
    assert 1 / 6 < record["chance_last10"] < 0.3


def test_slow_mode_is_limited_to_its_samples_and_the_others_are_compared_with_it(implicit_run: Path) -> None:
    simultaneous, sequential, _ = records(implicit_run)[:3]
    assert sequential["num_samples"] == 5
    assert sequential["token_match_sequential"] is None
    assert 0 <= simultaneous["token_match_sequential"] <= 1


def test_manifest_has_the_headline_and_no_partial_result_is_left(implicit_run: Path) -> None:
    manifest = Manifest.read(implicit_run / "manifest.json")
    headline = manifest.summary["accuracy_last10"]
    assert {data: sorted(modes) for data, modes in headline.items()} == {
        f"s3-test-L{length}-h0.5": ["published", "sequential", "simultaneous"] for length in LENGTHS
    }
    assert manifest.summary["best_accuracy_last10"] == {data: max(modes.values()) for data, modes in headline.items()}
    assert [record.path.rsplit("/")[-1] for record in manifest.files] == ["metrics.json"]
    assert not list(implicit_run.rglob("partial"))


def test_explicit_model_has_the_one_mode_parallel(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    found = records(evaluate(tmp_path, {"model": train(tmp_path, "explicit"), **tests_by_role}))
    assert [(record["kind"], record["mode"]) for record in found] == [("word_problem", "parallel")] * 2
    assert {record["f_evaluations_per_token"] for record in found} == {1.0}


def test_interrupted_evaluation_goes_on_after_what_it_finished_with_the_same_numbers(
    tmp_path: Path, implicit_run: Path, tests_by_role: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    evaluated: list[str] = []
    whole = stage.evaluate_word_problem

    def killed_at_the_fourth(job: EvaluationJob) -> Any:
        if len(evaluated) == 3:
            raise KeyboardInterrupt
        evaluated.append(job.where)
        return whole(job)

    monkeypatch.setattr(stage, "evaluate_word_problem", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path, inputs)
    assert not (tmp_path / "evaluate" / "manifest.json").exists()
    first, evaluated = evaluated, []
    assert records(evaluate(tmp_path, inputs)) == records(implicit_run)
    assert not set(first) & set(evaluated)


def test_a_missing_input_is_named_with_what_to_give(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    with pytest.raises(InputMissing, match="add --input model=DIR"):
        evaluate(tmp_path, tests_by_role)
    with pytest.raises(EvaluateInputError, match="add --input"):
        evaluate(tmp_path, {"model": train(tmp_path, "explicit")})
    data = next(iter(tests_by_role.values()))
    with pytest.raises(EvaluateInputError, match=r"manifest\.json: names no model/config\.json"):
        evaluate(tmp_path, {"model": data, **tests_by_role})


def test_only_the_lengths_asked_for_are_evaluated(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    inputs = {"model": train(tmp_path, "explicit"), **tests_by_role}
    assert {record["length"] for record in records(evaluate(tmp_path, inputs, lengths=[24]))} == {24}
    with pytest.raises(EvaluateInputError, match=r"lengths: no test set has sequences of 48 tokens; there are 12, 24"):
        evaluate(tmp_path / "again", inputs, lengths=[24, 48])


def test_the_names_of_swept_metrics_are_such_as_mlflow_takes(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    sweep = {"eval_max_iter": [2], "eval_tol": [0.5]}
    run_dir = evaluate(tmp_path, inputs, MODES[:1], lengths=[12], sweep=sweep)
    assert [record["mode"] for record in records(run_dir)] == [
        "simultaneous@eval_max_iter=2",
        "simultaneous@eval_tol=0.5",
    ]
    (path,) = run_dir.rglob("journal.jsonl")
    names = {name for point in journal.read(path) for name in point.values}
    assert "accuracy_last10.s3-test-L12-h0.5.simultaneous.eval_tol-0.5" in names
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in names)


def test_a_model_is_evaluated_without_the_checkpoint_of_its_training_and_not_without_its_weights(
    tmp_path: Path, tests_by_role: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(tmp_path, "implicit")
    given = ["--model", str(trained), *(part for path in tests_by_role.values() for part in ("--data", str(path)))]
    by_hand = ["evaluate", "word-problem", *given, "--max-iter", "3", "--out"]
    work = trained / "work" / Manifest.read(trained / "manifest.json").fingerprint[:16]
    shutil.rmtree(work / "checkpoint")
    assert run(capsys, *by_hand, str(tmp_path / "with"))[0] == 0
    assert len(records(tmp_path / "with")) == 2
    (work / "model" / "model.safetensors").write_bytes(b"")
    code, _, message = run(capsys, *by_hand, str(tmp_path / "without"))
    assert code == 2
    assert re.search(
        r"error: .*model\.safetensors: expected \d+ bytes, found 0; type `rm -f .*manifest\.json`", message
    )
