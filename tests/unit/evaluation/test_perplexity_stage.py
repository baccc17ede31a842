"""The stage in its frame, on a small stream of tokens and untrained models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm.evaluation.kinds import perplexity as stage
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation.finished_runs import records, request, train_nothing
from tests.unit.evaluation.small_streams import write_stream

VOCAB, NUM_TOKENS, ROLE = 40, 200, "text-test"
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3, "max_samples": 2},
]


def config_of(lengths: list[int], **changes: Any) -> dict[str, Any]:
    return {"kind": "perplexity", "modes": MODES, "lengths": lengths, **changes}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a stream of 200 tokens."""

    def body(context: StageContext) -> StageResult:
        tokens = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS)
        return StageResult(write_stream(context.work, tokens, VOCAB), {})

    run_dir = tmp_path_factory.mktemp("data") / ROLE
    run_stage(request(run_dir, "data", ROLE, {"kind": "token_stream"}, {}), body)
    return run_dir


def train(folder: Path, kind: str) -> Path:
    summary = {"data": {"kind": "token_stream", "length": 16}, "tokens": 4096, "flops": 1.5e9}
    return train_nothing(folder, kind, "text", VOCAB, summary)


def evaluate(folder: Path, inputs: dict[str, Path], config: dict[str, Any]) -> Path:
    run_dir = folder / "evaluate"
    run_stage(request(run_dir, "evaluate", "text-s7/free/perplexity", config, inputs), stage.run)
    return run_dir


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return evaluate(folder, {"model": train(folder, "implicit"), ROLE: text}, config_of([32, 16]))


def test_every_length_is_evaluated_in_every_mode_shortest_first(implicit_run: Path) -> None:
    found = [(record["length"], record["mode"], record["num_tokens"]) for record in records(implicit_run)]
    # Of 200 tokens all but the first are predicted; in sequential mode those of the first two rows.
    assert found == [
        (16, "simultaneous", 199),
        (16, "sequential", 2 * 16),
        (32, "simultaneous", 199),
        (32, "sequential", 2 * 32),
    ]


def test_records_say_what_was_measured_on_what_and_how_it_was_trained(implicit_run: Path) -> None:
    record = records(implicit_run)[0]
    expected = {"kind": "perplexity", "data": ROLE, "run": "text-implicit", "phase": "free", "seed": 7}
    expected |= {"is_implicit": True, "train_length": 16, "train_tokens": 4096, "train_flops": 1.5e9}
    assert {key: record[key] for key in expected} == expected
    assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))
    assert record["num_parameters"] > 1000
    assert 1 < record["f_evaluations_per_token"] <= 4


def test_a_model_read_as_trained_has_the_loss_of_its_training_pass(tmp_path: Path, text: Path) -> None:
    trained = train(tmp_path, "implicit")
    modes = [{"name": "as_trained", "eval_mode": "as_trained"}]
    (record,) = records(evaluate(tmp_path, {"model": trained, ROLE: text}, config_of([199], modes=modes)))
    model = AutoModelForCausalLM.from_pretrained(next(trained.rglob("model")), local_files_only=True).train()
    row = torch.as_tensor(np.fromfile(next(text.rglob("tokens.bin")), dtype="<u2").astype(np.int64))[None]
    out = model(input_ids=row[:, :-1], labels=row[:, 1:], aligned=True)
    assert record["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert record["f_evaluations_per_token"] == pytest.approx(float(out.solver_stats.f_evaluations))
    assert (record["eval_mode"], record["eval_max_iter"], record["eval_tol"]) == ("as_trained", None, None)


def test_length_that_no_row_reaches_is_missing_with_a_warning(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        inputs = {"model": train(tmp_path, "explicit"), ROLE: text}
        short, long = records(evaluate(tmp_path, inputs, config_of([16, 200])))
    assert short["perplexity"] > 1
    assert (long["length"], long["loss"], long["perplexity"], long["num_tokens"]) == (200, None, None, 0)
    assert long["loss_by_position"] is None
    assert "no row of 200 tokens" in caplog.text


def test_max_tokens_takes_the_first_rows_and_at_least_one(tmp_path: Path, text: Path) -> None:
    inputs = {"model": train(tmp_path, "explicit"), ROLE: text}
    found = records(evaluate(tmp_path, inputs, config_of([16, 128], max_tokens=70)))
    assert [record["num_tokens"] for record in found] == [4 * 16, 128]
