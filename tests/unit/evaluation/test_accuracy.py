"""Word problems and CatbAbI: what is counted, how batches fit, and the stages in their frame on untrained models."""

import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from implicit_llm.evaluation.answers import (
    GOOD_BATCHES,
    EvaluationBatchSize,
    EvaluationJob,
    EvaluationOutOfMemory,
    EvaluationResult,
    UnknownToken,
    answers,
)
from implicit_llm.evaluation.frame import EvaluateInputError, load_model
from implicit_llm.evaluation.kinds import catbabi
from implicit_llm.evaluation.kinds import word_problem as stage
from implicit_llm.evaluation.kinds.catbabi import AnswerTally, carries_state, evaluate_catbabi
from implicit_llm.evaluation.kinds.perplexity import PerplexityTally, evaluate_perplexity
from implicit_llm.evaluation.kinds.word_problem import (
    AccuracyTally,
    chance_per_position,
    default_batch_size,
    evaluate_word_problem,
    match,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_contracts.runs.stage_context import InputMissing
from implicit_llm_data.shards import IGNORED_LABEL, open_dataset
from implicit_llm_data.stages import babi_text
from implicit_llm_data.stages import catbabi as data_stage
from implicit_llm_data.stages.word_problem import generate
from implicit_llm_jobs.stage import run_stage
from tests.refusals import refused
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import (
    VOCAB,
    Rows,
    StandIn,
    problems,
    records,
    request,
    small_model,
    stop_at,
    summary,
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


def evaluate(
    model: StandIn, rows: Rows | None = None, batch_size: EvaluationBatchSize | None = None
) -> EvaluationResult:
    rows = rows or problems()
    return evaluate_word_problem(
        EvaluationJob(model, rows, len(rows), batch_size or EvaluationBatchSize(4), "data mode")
    )


def test_accuracies_count_positions_last_ten_tokens_and_whole_sequences() -> None:
    expected = {"accuracy_per_position": [1.0] * 9 + [0.0] * 3, "accuracy_last10": pytest.approx(0.7)}
    expected |= {"accuracy_token": pytest.approx(0.75), "accuracy_sequence": 0.0, "num_samples": 10}
    values = evaluate(StandIn(right_until=9)).values
    assert {key: values[key] for key in expected} == expected
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
    job = EvaluationJob(
        model, Rows(1, length), 1, EvaluationBatchSize(default_batch_size(length, "cpu")), "data blockwise"
    )
    in_pieces = evaluate_word_problem(job)
    assert {call.args[0].shape[:2] for call in apply_stack.call_args_list} == {(1, 512)}
    monkeypatch.setattr(stage, "PIECE", length)
    whole = evaluate_word_problem(job)
    np.testing.assert_array_equal(in_pieces.predictions_NL, whole.predictions_NL)
    assert in_pieces.values == whole.values


@pytest.mark.parametrize(
    ("sizes", "last"),
    [((2, 2), 4), ((1, 1), 4), ((1, 1), 6)],
    ids=["within a batch", "batch by batch", "after a whole batch"],
)
def test_a_long_evaluation_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], last: int
) -> None:
    monkeypatch.setattr(stage, "PIECE", 64)
    monkeypatch.setattr(stage, "SAVE_EVERY_S", 0.0)
    model = small_model("implicit")
    model.solver = replace(model.solver, eval_mode="blockwise", eval_block_len=16, eval_max_iter=4)

    def job(size: int, kept: Path | None = tmp_path) -> EvaluationJob:
        return EvaluationJob(model, Rows(2, 256), 2, EvaluationBatchSize(size), "data blockwise", kept=kept)

    whole = evaluate_word_problem(job(sizes[0], kept=None))
    calls = stop_at(monkeypatch, type(model), "forward", last)
    with pytest.raises(KeyboardInterrupt):
        evaluate_word_problem(job(sizes[0]))
    resumed = evaluate_word_problem(job(sizes[1]))
    assert len(calls) == 1 + 4 * 2 // sizes[0]  # the piece that was stopped is read again, no other
    np.testing.assert_array_equal(resumed.predictions_NL, whole.predictions_NL)
    assert resumed.values == whole.values


def test_long_sequences_are_evaluated_as_trained_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("implicit")
    model.solver = replace(model.solver, eval_mode="as_trained")
    job = EvaluationJob(model, Rows(2, 256), 2, EvaluationBatchSize(2), "data as trained")
    expected = evaluate_word_problem(job)
    monkeypatch.setattr(stage, "PIECE", 64)
    found = evaluate_word_problem(job)
    np.testing.assert_array_equal(found.predictions_NL, expected.predictions_NL)
    assert found.values == expected.values


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate much"),
        RuntimeError(
            "Triton Error [CUDA]: out of memory"
        ),  # as torch's allocator holds what the kernel's own memory needs
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_batch_is_halved_until_it_fits_and_every_sample_counts_once(error: RuntimeError) -> None:
    rows, size = problems(), EvaluationBatchSize(8)
    values = evaluate(StandIn(fits=3, out_of_memory=error), rows, size).values
    assert size.size == 2
    assert rows.fetched == [8, 4, 2, 2, 2, 2, 2]
    assert (values["num_samples"], values["accuracy_token"]) == (10, 1.0)


def test_a_halved_batch_grows_again_once_there_is_memory_and_no_result_changes() -> None:
    rows, size = problems(num_rows=100), EvaluationBatchSize(8)
    model = StandIn(fits=3, right_until=9)
    forward, num_calls = model.forward, 0

    def forward_beside_another_job(input_ids: torch.Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        model.fits = 3 if num_calls < 10 else 8
        return forward(input_ids)

    model.forward = forward_beside_another_job  # type: ignore[method-assign]
    found = evaluate(model, rows, size)
    assert rows.fetched == [8, 4, *[2] * GOOD_BATCHES, *[4] * GOOD_BATCHES, *[8] * 6, 4]
    expected = evaluate(StandIn(right_until=9), problems(num_rows=100), EvaluationBatchSize(2))
    np.testing.assert_array_equal(found.predictions_NL, expected.predictions_NL)
    for key in ("accuracy_per_position", "accuracy_sequence", "f_evaluations_per_token", "num_samples"):
        assert found.values[key] == expected.values[key]


def test_a_size_that_never_fits_is_tried_less_and_less_often() -> None:
    rows, size = problems(num_rows=500), EvaluationBatchSize(2)
    evaluate(StandIn(fits=1), rows, size)
    failed = [index - number for number, index in enumerate(np.flatnonzero(np.array(rows.fetched) == 2))]
    assert failed == [0, *(GOOD_BATCHES * (2**count - 1) for count in range(1, 6))]  # batches that fitted before it
    fixed = EvaluationBatchSize(4, is_fixed=True)
    evaluate(StandIn(), problems(num_rows=100), fixed)
    assert fixed.size == 4


def test_the_tensors_of_a_batch_that_does_not_fit_are_freed_before_the_device_takes_back_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, held, still_held = StandIn.forward, [], []

    def fill_and_forward(model: StandIn, **given: Any) -> Any:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        return forward(model, **given)

    monkeypatch.setattr(StandIn, "forward", fill_and_forward)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: still_held.append(held[-1]() is not None))
    evaluate(StandIn(fits=3), batch_size=EvaluationBatchSize(8))
    assert still_held == [False, False]


@pytest.mark.parametrize(
    ("fits", "size", "named"),
    [
        (3, EvaluationBatchSize(8, is_fixed=True), "batch size 8; .* set a smaller batch_size"),
        (0, EvaluationBatchSize(4), "batch size 1;"),
    ],
    ids=["a size that belongs to the result", "a single sequence"],
)
def test_a_batch_that_cannot_be_halved_is_the_users_error(fits: int, size: EvaluationBatchSize, named: str) -> None:
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
    job = EvaluationJob(
        small_model("gpt_neox"), Rows(**{column: np.full((7, 12), VOCAB)}), 2, EvaluationBatchSize(2), "here"
    )
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
    found = evaluate(EvaluationJob(StandIn(**change), problems(), 10, EvaluationBatchSize(3), "data mode")).values
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


def run_evaluation(folder: Path, inputs: dict[str, Path], modes: list[dict[str, Any]] = MODES, **settings: Any) -> Path:
    config = {"kind": "word_problem", "modes": modes, **settings}
    return finished_runs.evaluate(stage, folder, "s3-s7/free/word-problem", config, inputs)


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, tests_by_role: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return run_evaluation(folder, {"model": train(folder, "implicit"), **tests_by_role})


def test_every_data_set_is_evaluated_in_every_mode_shortest_first_and_compared_with_the_slow_one(
    implicit_run: Path,
) -> None:
    found = records(implicit_run)
    assert [(r["length"], r["mode"]) for r in found] == [(length, m["name"]) for length in LENGTHS for m in MODES]
    simultaneous, sequential, _ = found[:3]
    assert (sequential["num_samples"], sequential["token_match_sequential"]) == (5, None)
    assert 0 <= simultaneous["token_match_sequential"] <= 1


def test_in_a_sweep_each_mode_is_compared_with_the_sequential_one_of_the_same_value(
    tmp_path: Path, tests_by_role: dict[str, Path]
) -> None:
    modes = [
        {"name": "blocks", "eval_mode": "blockwise", "eval_block_len": 1},
        {"name": "slow", "eval_mode": "sequential"},
    ]
    path = run_evaluation(
        tmp_path, {"model": train(tmp_path, "implicit"), **tests_by_role}, modes, sweep={"eval_max_iter": [1, 30]}
    )
    assert [record["token_match_sequential"] for record in records(path)[:4]] == [1.0, 1.0, None, None]


def test_records_say_what_was_measured_on_what_and_how_it_was_trained(implicit_run: Path) -> None:
    record = records(implicit_run)[0]
    expected = {"run": "s3-implicit", "seed": 7, "phase": "free", "group": "S3", "monoid": "none", "hard_fraction": 0.5}
    expected |= {"train_length": 12, "train_hard_fraction": 0.5, "is_implicit": True, "num_layers": 1, "num_samples": 9}
    assert {key: record[key] for key in expected} == expected
    assert len(record["accuracy_per_position"]) == 12
    assert 1 < record["f_evaluations_per_token"] <= 4
    assert 1 / 6 < record["chance_last10"] < 0.3


def test_precision_rounds_what_the_model_computes(
    tmp_path: Path, implicit_run: Path, tests_by_role: dict[str, Path]
) -> None:
    rounded = run_evaluation(tmp_path, {"model": train(tmp_path, "implicit"), **tests_by_role}, precision="bf16")
    for mine, other in zip(records(rounded), records(implicit_run), strict=True):
        assert mine["residual"] != other["residual"]
        assert mine["residual"] == pytest.approx(other["residual"], rel=0.2)


def test_manifest_has_the_headline_and_no_partial_result_is_left(implicit_run: Path) -> None:
    headline, best = (summary(implicit_run)[key] for key in ("accuracy_last10", "best_accuracy_last10"))
    assert {data: sorted(modes) for data, modes in headline.items()} == {
        f"s3-test-L{length}-h0.5": ["published", "sequential", "simultaneous"] for length in LENGTHS
    }
    assert best == {data: max(modes.values()) for data, modes in headline.items()}
    files = Manifest.read(implicit_run / "manifest.json").files
    assert [record.path.rsplit("/")[-1] for record in files] == ["metrics.json"]
    assert not list(implicit_run.rglob("partial"))


def test_interrupted_evaluation_goes_on_after_what_it_finished_with_the_same_numbers(
    tmp_path: Path, implicit_run: Path, tests_by_role: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    calls = stop_at(monkeypatch, stage, "evaluate_word_problem", 4)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(tmp_path, inputs)
    assert not (tmp_path / "evaluate" / "manifest.json").exists()
    assert records(run_evaluation(tmp_path, inputs)) == records(implicit_run)
    assert not {job.where for (job,) in calls[:3]} & {job.where for (job,) in calls[4:]}


def test_a_missing_input_is_named_with_what_to_give(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    with pytest.raises(InputMissing, match="no input `model`; add its run directory to `inputs`"):
        run_evaluation(tmp_path, tests_by_role)
    with pytest.raises(EvaluateInputError, match="no test data; add"):
        run_evaluation(tmp_path, {"model": train(tmp_path, "explicit")})
    with pytest.raises(EvaluateInputError, match=r"manifest\.json: names no model/config\.json"):
        run_evaluation(tmp_path, {"model": next(iter(tests_by_role.values())), **tests_by_role})


def test_weights_of_another_shape_than_config_json_are_refused_in_one_line(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "explicit")
    (path,) = run_dir.glob("work/**/model.safetensors")
    weights = load_file(path)
    save_file({name: value.flatten()[:3].clone() for name, value in weights.items()}, path, {"format": "pt"})
    trained: Any = SimpleNamespace(dir=path.parents[1], manifest=SimpleNamespace(model_folder="model", config={}))
    with refused(f"{path.parent}: its weights lack .* as config.json wants it", EvaluateInputError):
        load_model(trained, {"device": "cpu"})
    trained.manifest.config["model"] = {"package": "not_there"}
    with refused(f"{path.parent}: not_there cannot be imported .*; install it", EvaluateInputError):
        load_model(trained, {"device": "cpu"})


def test_an_explicit_model_has_the_one_mode_parallel_at_the_lengths_asked_for(
    tmp_path: Path, tests_by_role: dict[str, Path]
) -> None:
    inputs = {"model": train(tmp_path, "explicit"), **tests_by_role}
    (record,) = records(run_evaluation(tmp_path, inputs, lengths=[24]))
    assert (record["kind"], record["mode"], record["length"]) == ("word_problem", "parallel", 24)
    assert record["f_evaluations_per_token"] == 1.0
    with pytest.raises(EvaluateInputError, match=r"lengths: no test set has sequences of 48 tokens; there are 12, 24"):
        run_evaluation(tmp_path / "again", inputs, lengths=[24, 48])


def test_the_names_of_swept_metrics_are_such_as_mlflow_takes(tmp_path: Path, tests_by_role: dict[str, Path]) -> None:
    inputs = {"model": train(tmp_path, "implicit"), **tests_by_role}
    run_dir = run_evaluation(tmp_path, inputs, MODES[:1], lengths=[12], sweep={"eval_max_iter": [2], "eval_tol": [0.5]})
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


QUESTION = 2  # the token of "?"
# Two rows of a made-up vocabulary; the stand-in answers every token x with (x + 1) % 6, so after "?" it says 3.
INPUTS = np.array([[0, 1, 2, 3, 2, 4], [2, 5, 2, 3, 2, 0]])
LABELS = np.array([[1, 2, 3, 2, 4, 5], [5, 2, 3, 2, IGNORED_LABEL, IGNORED_LABEL]])
TASKS = np.array([[1, 1, 1, 7, 7, 7], [7, 7, 7, 7, 0, 0]])
NUM_WORDS, LENGTH, ROLE = 192, 48, "babi-test"
TEXT: dict[str, Any] = {
    "kind": "babi_text", "source": "simulated", "seed": 0, "families": [1, 8], "story_length": 6,
    "stories": {"train": 4, "valid": 2, "test": 5},
}  # fmt: skip
ROWS: dict[str, Any] = {
    "kind": "catbabi", "collection": "simulated", "split": "test", "mode": "lm", "length": LENGTH,
    "vocab_size": NUM_WORDS, "seed": 0, "drop_last_story": True,
}  # fmt: skip
BABI_MODES = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "blockwise", "eval_mode": "blockwise", "eval_max_iter": 3, "eval_block_len": 16},
]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_accuracy_at_questions_equals_the_count_by_hand(batch_size: int) -> None:
    rows = Rows(input_ids=INPUTS, labels=LABELS, task=TASKS)
    values = evaluate_catbabi(
        EvaluationJob(StandIn(), rows, 2, EvaluationBatchSize(batch_size), "data mode"), QUESTION
    ).values
    # The stand-in has the logit 1 for its answer and 0 for the five others.
    right, wrong = math.log(math.e + 5) - 1, math.log(math.e + 5)
    perplexities = {"1": math.exp(right), "7": math.exp((2 * right + 5 * wrong) / 7)}
    expected: dict[str, Any] = {
        # Answers: row 0 has 3 (right, task 1) and 4 (wrong, task 7); row 1 has 5 (wrong), 3 (right), and one padded.
        "num_questions_by_task": {"1": 1, "7": 3},
        "accuracy_by_task": {"1": 1.0, "7": pytest.approx(1 / 3)},
        "num_questions": 4,
        "accuracy": 0.5,
        # Next words: 0->1, 1->2, 2->3 right, 3->2, 2->4 wrong, 4->5 right; 2->5, 5->2 wrong, 2->3 right, 3->2 wrong.
        "lm_accuracy": 0.5,
        "num_words_by_task": {"1": 3, "7": 7},
        "lm_accuracy_by_task": {"1": 1.0, "7": pytest.approx(2 / 7)},
        "lm_perplexity_by_task": pytest.approx(perplexities, rel=1e-6),
        "lm_perplexity": pytest.approx(math.exp((right + wrong) / 2), rel=1e-6),
    }
    assert {key: values[key] for key in expected} == expected


@pytest.fixture(scope="module")
def babi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("babi")
    run_stage(request(folder / "text", "data", "babi-text", TEXT, {}), babi_text.run)
    run_stage(request(folder / "test", "data", ROLE, ROWS, {"text": folder / "text"}), data_stage.run)
    valid = ROWS | {"split": "valid"}
    run_stage(request(folder / "valid", "data", "babi-valid", valid, {"text": folder / "text"}), data_stage.run)
    return folder / "test"


def work_of(run_dir: Path) -> Path:
    return work_directory(run_dir, Manifest.read(run_dir / "manifest.json").fingerprint)


def evaluate_babi(folder: Path, kind: str, data: Path | dict[str, Path], **settings: Any) -> Path:
    trained = train_nothing(folder, kind, "babi", NUM_WORDS, {"data": {"kind": "catbabi", "length": LENGTH}})
    config = {"kind": "catbabi", "modes": BABI_MODES, **settings}
    return finished_runs.evaluate(
        catbabi,
        folder,
        f"babi-{kind}-s7/free/catbabi",
        config,
        {"model": trained, **(data if isinstance(data, dict) else {ROLE: data})},
    )


def test_records_name_the_protocol_and_are_made_in_every_mode(tmp_path: Path, babi: Path) -> None:
    run_dir = evaluate_babi(tmp_path, "implicit", babi)
    found = records(run_dir)
    assert [record["mode"] for record in found] == ["simultaneous", "blockwise"]
    expected = {"kind": "catbabi", "protocol": "windowed", "data": ROLE, "run": "babi-implicit", "phase": "free"}
    expected |= {"seed": 7, "length": LENGTH, "num_layers": 1, "train_tokens": None, "train_flops": None}
    assert {key: found[0][key] for key in expected} == expected
    assert 0 <= found[0]["lm_accuracy"] <= 1 < found[0]["lm_perplexity"]
    assert sorted(summary(run_dir)["accuracy"][ROLE]) == ["blockwise", "simultaneous"]


def read_word_by_word(folder: Path, data: Path, most: int | None) -> tuple[list[dict[str, Any]], float]:
    """The words of the test set in file order, each after all before it: is it a question, is the answer right."""
    cache = ConvergedStateCache()
    words = json.loads((work_of(data) / "vocabulary.json").read_text())
    dataset = open_dataset(work_of(data))
    rows = dataset.fetch(np.arange(len(dataset)))
    model = AutoModelForCausalLM.from_pretrained(next((folder / "train").rglob("model")), local_files_only=True).eval()
    if model.solver is not None:
        model.solver = replace(model.solver, eval_mode="sequential", eval_max_iter=3)
    found, total = [], 0.0
    for token, label, task in zip(*(rows[name].ravel() for name in ("input_ids", "labels", "task")), strict=True):
        if token == 0 or len(found) == most:  # <pad>: the end of the last row
            break
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, 0].double()
        total -= float(logits.log_softmax(-1)[label])
        found.append({"is_question": words[token] == "?", "task": task, "is_right": int(logits.argmax()) == label})
    return found, total / len(found)


@pytest.mark.parametrize(("kind", "most"), [("explicit", None), ("implicit", 3 * LENGTH)], ids=["explicit", "implicit"])
def test_carried_accuracy_equals_a_count_over_one_pass_through_all_stories(
    tmp_path: Path, babi: Path, kind: str, most: int | None
) -> None:
    modes = [{"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3}]
    settings = {"protocols": ["carried"], "carried_max_tokens": most, "modes": modes}
    (record,) = records(evaluate_babi(tmp_path, kind, babi, **settings))
    found, loss = read_word_by_word(tmp_path, babi, most)
    answers = [word["is_right"] for word in found if word["is_question"]]
    tasks = {word["task"] for word in found}
    by_task = {str(task): np.mean([word["is_right"] for word in found if word["task"] == task]) for task in tasks}
    expected = {"protocol": "carried", "num_words": len(found), "num_questions": len(answers)}
    expected |= {"accuracy": np.mean(answers), "lm_accuracy": np.mean([word["is_right"] for word in found])}
    expected |= {"lm_accuracy_by_task": by_task, "lm_perplexity": pytest.approx(np.exp(loss), rel=1e-5)}
    assert {key: record[key] for key in expected} == expected
    assert len(found) >= 3 * LENGTH


def test_both_protocols_are_named_and_differ_only_by_the_state_before_a_window(tmp_path: Path, babi: Path) -> None:
    modes = [{**BABI_MODES[1], "max_samples": 2}]
    run_dir = evaluate_babi(tmp_path, "implicit", babi, protocols=["windowed", "carried"], modes=modes)
    found = {(record["protocol"], record["mode"]): record for record in records(run_dir)}
    assert sorted(found) == [("carried", "blockwise"), ("windowed", "blockwise")]
    assert {record["num_words"] for record in found.values()} == {2 * LENGTH}
    windowed, carried = found["windowed", "blockwise"], found["carried", "blockwise"]
    assert carried["lm_perplexity"] != windowed["lm_perplexity"]
    assert carried["lm_perplexity"] == pytest.approx(windowed["lm_perplexity"], rel=0.05)
    assert sorted(summary(run_dir)["accuracy"]) == [ROLE, f"{ROLE}.carried"]


@pytest.mark.parametrize("has_test_set", [True, False])
def test_the_validation_set_is_carried_only_if_there_is_no_test_set(
    tmp_path: Path, babi: Path, has_test_set: bool
) -> None:
    data = {"babi-valid": babi.parent / "valid"} | ({ROLE: babi} if has_test_set else {})
    settings = {"protocols": ["windowed", "carried"], "modes": [{**BABI_MODES[1], "max_samples": 1}]}
    found = {
        (record["data"], record["protocol"])
        for record in records(evaluate_babi(tmp_path, "explicit", data, **settings))
    }
    carried = ROLE if has_test_set else "babi-valid"
    assert found == {(role, "windowed") for role in data} | {(carried, "carried")}


def test_model_without_a_state_to_carry_has_no_number_in_that_protocol(
    tmp_path: Path, babi: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catbabi, "carries_state", lambda model: False)
    windowed, carried = records(evaluate_babi(tmp_path, "explicit", babi, protocols=["windowed", "carried"]))
    assert windowed["accuracy"] is not None
    assert (carried["protocol"], carried["accuracy"], carried["lm_perplexity"]) == ("carried", None, None)
    assert carried["num_questions"] is None
    assert "no state of fixed size" in caplog.text


def test_only_recurrent_models_have_a_state_to_carry() -> None:
    assert carries_state(small_model("implicit"))
    assert not carries_state(small_model("implicit", family="llama3"))
