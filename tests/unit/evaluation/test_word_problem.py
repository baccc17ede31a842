"""Word problems: what is counted, how batches fit, and the stage in its frame on S3 and untrained models."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import (
    BatchSize,
    Evaluation,
    EvaluationJob,
    EvaluationOutOfMemory,
    UnknownToken,
    answers,
)
from implicit_llm.evaluation.frame import EvaluateInputError
from implicit_llm.evaluation.kinds import word_problem as stage
from implicit_llm.evaluation.kinds.catbabi import AnswerTally, evaluate_catbabi
from implicit_llm.evaluation.kinds.perplexity import PerplexityTally, evaluate_perplexity
from implicit_llm.evaluation.kinds.word_problem import (
    AccuracyTally,
    chance_per_position,
    default_batch_size,
    evaluate_word_problem,
    match,
)
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import InputMissing
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import (
    VOCAB,
    Rows,
    StandIn,
    problems,
    records,
    small_model,
    train_nothing,
    word_problems,
)
from tests.unit.workflow.experiments import run

LENGTHS = (12, 24)
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3, "max_samples": 5},
    {"name": "published", "eval_mode": "simultaneous", "eval_max_iter": 3},
]


def evaluate(model: StandIn, rows: Rows | None = None, batch_size: BatchSize | None = None) -> Evaluation:
    rows = rows or problems()
    return evaluate_word_problem(EvaluationJob(model, rows, len(rows), batch_size or BatchSize(4), "data mode"))


def test_accuracies_count_positions_last_ten_tokens_and_whole_sequences() -> None:
    values = evaluate(StandIn(right_until=9)).values
    assert values["accuracy_per_position"] == [1.0] * 9 + [0.0] * 3
    assert values["accuracy_last10"] == pytest.approx(0.7)
    assert values["accuracy_token"] == pytest.approx(0.75)
    assert values["accuracy_sequence"] == 0.0
    assert values["num_samples"] == 10
    # A sequence shorter than ten tokens counts all of them.
    assert evaluate(StandIn(right_until=3), problems(length=4)).values["accuracy_last10"] == 0.75


@pytest.mark.parametrize(
    ("is_implicit", "evaluations", "iterations", "residual", "unconverged"),
    [
        (True, 8.0, 7.0, pytest.approx(0.2), pytest.approx(3 * 3 / 120)),  # one sequence in each of three batches
        (False, 1.0, None, None, None),
    ],
)
def test_solver_statistics_are_gathered_over_batches_with_the_closing_evaluation(
    is_implicit: bool, evaluations: float, iterations: Any, residual: Any, unconverged: Any
) -> None:
    values = evaluate(StandIn(is_implicit=is_implicit)).values
    assert (values["f_evaluations_per_token"], values["iterations_per_token"]) == (evaluations, iterations)
    assert (values["residual"], values["unconverged_share"]) == (residual, unconverged)


@pytest.mark.parametrize("length", [32, 1024, 16384, 2**22])
def test_a_batch_holds_a_bounded_number_of_tokens_and_at_least_one_sequence(length: int) -> None:
    size = default_batch_size(length, "cpu")
    assert size == 1 or size * length <= 2**16
    assert 1 <= size <= default_batch_size(length, "cuda") <= 4096


def test_blockwise_the_layers_never_see_more_than_a_block_however_long_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, length = small_model("implicit"), 16384
    model.solver = replace(model.solver, eval_mode="blockwise", eval_block_len=512, eval_max_iter=4)
    apply_stack = Mock(wraps=model.base.apply_stack)
    monkeypatch.setattr(type(model.base), "apply_stack", apply_stack)
    job = EvaluationJob(model, Rows(1, length), 1, BatchSize(default_batch_size(length, "cpu")), "data blockwise")
    assert len(evaluate_word_problem(job).values["accuracy_per_position"]) == length
    assert {call.args[0].shape[:2] for call in apply_stack.call_args_list} == {(1, 512)}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_batch_is_halved_until_it_fits_and_every_sample_counts_once(error: type[RuntimeError]) -> None:
    rows, size = problems(), BatchSize(8)
    values = evaluate(StandIn(fits=3, out_of_memory=error), rows, size).values
    assert size.size == 2
    assert rows.fetched == [8, 4, 2, 2, 2, 2, 2]
    assert (values["num_samples"], values["accuracy_token"]) == (10, 1.0)


@pytest.mark.parametrize(
    ("fits", "size", "named"),
    [(3, BatchSize(8, is_fixed=True), "batch_size"), (0, BatchSize(4), "single sequence")],
    ids=["a size that belongs to the result", "a single sequence"],
)
def test_a_batch_that_cannot_be_halved_is_the_users_error(fits: int, size: BatchSize, named: str) -> None:
    with pytest.raises(EvaluationOutOfMemory, match=named) as caught:
        evaluate(StandIn(fits=fits), batch_size=size)
    assert caught.value.exit_code == 2


def test_other_runtime_errors_are_not_taken_for_lack_of_memory() -> None:
    broken = StandIn()
    broken.forward = Mock(side_effect=RuntimeError("shapes do not match"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes"):
        evaluate(broken)


def test_match_compares_the_samples_both_have_and_only_finite_ones() -> None:
    right, half = evaluate(StandIn()), evaluate(StandIn(right_until=6))
    assert match(half, right) == 0.5
    assert match(right, evaluate(StandIn(), problems(num_rows=4))) == 1.0
    assert match(right, right) is None
    assert match(right, evaluate(StandIn(nan_at=0))) is None


@pytest.mark.parametrize(
    ("column", "options"), [("input_ids", {}), ("labels", {}), ("input_ids", {"ask": pytest.fail})]
)
def test_a_token_that_the_model_does_not_know_is_named_before_anything_is_asked(
    column: str, options: dict[str, Any]
) -> None:
    job = EvaluationJob(small_model("gpt_neox"), Rows(**{column: np.full((7, 12), VOCAB)}), 2, BatchSize(2), "here")
    with pytest.raises(UnknownToken, match=f"here: the data has token {VOCAB} and the model knows {VOCAB};"):
        next(answers(job, lambda out, batch: out, **options))


@pytest.mark.parametrize("change", [{"nan_at": 5}, {"raises_non_finite": True}])
@pytest.mark.parametrize(
    ("evaluate", "tally"),
    [
        (partial(evaluate_catbabi, question_id=2), AnswerTally),
        (evaluate_perplexity, PerplexityTally),
        (evaluate_word_problem, AccuracyTally),
    ],
)
def test_answers_that_are_not_finite_give_no_number_and_never_zero(
    change: dict[str, Any], evaluate: Any, tally: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluate(EvaluationJob(StandIn(**change), problems(), 10, BatchSize(3), "data mode")).values
    assert {found[key] for key in tally.measures} == {None}
    assert found["nonfinite_share"] > 0
    assert "sequences are not finite: no result is reported" in caplog.text
    assert (found["f_evaluations_per_token"] is None) is ("raises_non_finite" in change)


@pytest.mark.parametrize(
    ("group", "monoid", "hard_fraction"),
    [("S3", "none", 0.3), ("A4", "none", (0.1, 0.9)), ("S3", "aperiodic", 0.5), ("Z5", "none", 0.0)],
)
def test_chance_is_the_share_of_the_most_frequent_target(group: str, monoid: str, hard_fraction: Any) -> None:
    count, length = 40_000, 12
    config = WordProblemConfig(group, monoid, hard_fraction, length, count, "test", 0, count)  # type: ignore[arg-type]
    _, targets = generate(config, 0)
    frequent = np.array([np.bincount(targets[:, position]).max() / count for position in range(length)])
    assert chance_per_position(group, monoid, hard_fraction, length) == pytest.approx(frequent, abs=0.012)


def test_chance_of_long_hard_sequences_is_one_over_the_order_of_the_group() -> None:
    assert chance_per_position("A5", "none", 0.5, 64)[-1] == pytest.approx(1 / 60)


@pytest.fixture(scope="module")
def tests_by_role(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    paths = [word_problems(folder / f"s3-test-L{length}-h0.5", length=length) for length in LENGTHS]
    return {path.name: path for path in reversed(paths)}


def train(folder: Path, kind: str) -> Path:
    data = {"kind": "word_problem", "group": "S3", "monoid": "none", "hard_fraction": 0.5, "length": 12}
    return train_nothing(folder, kind, "s3", 6, {"data": data})


def run_stage(folder: Path, inputs: dict[str, Path], modes: list[dict[str, Any]] = MODES, **settings: Any) -> Path:
    config = {"kind": "word_problem", "modes": modes, **settings}
    return finished_runs.evaluate(stage, folder, "s3-s7/free/word-problem", config, inputs)


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, tests_by_role: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return run_stage(folder, {"model": train(folder, "implicit"), **tests_by_role})


def test_every_data_set_is_evaluated_in_every_mode_shortest_first_and_compared_with_the_slow_one(
    implicit_run: Path,
) -> None:
    found = records(implicit_run)
    assert [(r["length"], r["mode"]) for r in found] == [(length, m["name"]) for length in LENGTHS for m in MODES]
    simultaneous, sequential, _ = found[:3]
    assert (sequential["num_samples"], sequential["token_match_sequential"]) == (5, None)
    assert 0 <= simultaneous["token_match_sequential"] <= 1


def test_records_say_what_was_measured_on_what_and_how_it_was_trained(implicit_run: Path) -> None:
    record = records(implicit_run)[0]
    expected = {"run": "s3-implicit", "seed": 7, "phase": "free", "group": "S3", "monoid": "none", "hard_fraction": 0.5}
    expected |= {"train_length": 12, "train_hard_fraction": 0.5, "is_implicit": True, "num_layers": 1, "num_samples": 9}
    assert {key: record[key] for key in expected} == expected
    assert len(record["accuracy_per_position"]) == 12
    assert 1 < record["f_evaluations_per_token"] <= 4
    assert 1 / 6 < record["chance_last10"] < 0.3


def test_manifest_has_the_headline_and_no_partial_result_is_left(implicit_run: Path) -> None:
    manifest = Manifest.read(implicit_run / "manifest.json")
    headline = manifest.summary["accuracy_last10"]
    assert {data: sorted(modes) for data, modes in headline.items()} == {
        f"s3-test-L{length}-h0.5": ["published", "sequential", "simultaneous"] for length in LENGTHS
    }
    assert manifest.summary["best_accuracy_last10"] == {data: max(modes.values()) for data, modes in headline.items()}
    assert [record.path.rsplit("/")[-1] for record in manifest.files] == ["metrics.json"]
    assert not list(implicit_run.rglob("partial"))


def test_interrupted_evaluation_goes_on_after_what_it_finished_with_the_same_numbers(
    tmp_path: Path, implicit_run: Path, tests_by_role: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    evaluated: list[str] = []

    def killed_at_the_fourth(job: EvaluationJob) -> Any:
        if len(evaluated) == 3:
            raise KeyboardInterrupt
        evaluated.append(job.where)
        return evaluate_word_problem(job)

    monkeypatch.setattr(stage, "evaluate_word_problem", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, inputs)
    assert not (tmp_path / "evaluate" / "manifest.json").exists()
    first, evaluated = evaluated, []
    assert records(run_stage(tmp_path, inputs)) == records(implicit_run)
    assert not set(first) & set(evaluated)


def test_a_missing_input_is_named_with_what_to_give(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    with pytest.raises(InputMissing, match="add --input model=DIR"):
        run_stage(tmp_path, tests_by_role)
    with pytest.raises(EvaluateInputError, match="add --input"):
        run_stage(tmp_path, {"model": train(tmp_path, "explicit")})
    with pytest.raises(EvaluateInputError, match=r"manifest\.json: names no model/config\.json"):
        run_stage(tmp_path, {"model": next(iter(tests_by_role.values())), **tests_by_role})


def test_an_explicit_model_has_the_one_mode_parallel_at_the_lengths_asked_for(
    tmp_path: Path, tests_by_role: dict[str, Path]
) -> None:
    inputs = {"model": train(tmp_path, "explicit"), **tests_by_role}
    (record,) = records(run_stage(tmp_path, inputs, lengths=[24]))
    assert (record["kind"], record["mode"], record["length"]) == ("word_problem", "parallel", 24)
    assert record["f_evaluations_per_token"] == 1.0
    with pytest.raises(EvaluateInputError, match=r"lengths: no test set has sequences of 48 tokens; there are 12, 24"):
        run_stage(tmp_path / "again", inputs, lengths=[24, 48])


def test_the_names_of_swept_metrics_are_such_as_mlflow_takes(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    run_dir = run_stage(tmp_path, inputs, MODES[:1], lengths=[12], sweep={"eval_max_iter": [2], "eval_tol": [0.5]})
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
