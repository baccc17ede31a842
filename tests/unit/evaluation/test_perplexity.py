"""Perplexity: the rows of a stream, what is summed over them, and the stage in its frame on untrained models."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm.evaluation.answers import EvaluationBatchSize, EvaluationJob, PositionTally, position_bins
from implicit_llm.evaluation.kinds import perplexity as stage
from implicit_llm.evaluation.kinds.perplexity import TextRows, evaluate_perplexity
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import (
    END_OF_TEXT,
    finish,
    random_documents,
    records,
    small_model,
    train_nothing,
    write_stream,
)

# Documents of three, one, nine and two tokens, and end-of-text (0) behind each: shorter and longer than rows of five.
STREAM = [3, 4, 5, 0, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 1, 0]
VOCAB, NUM_TOKENS, ROLE = 40, 200, "text-test"
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3, "max_samples": 2},
]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_rows_inputs_targets_and_starts_of_documents_are_those_found_by_hand(tmp_path: Path, batch_size: int) -> None:
    write_stream(tmp_path, STREAM)
    rows, batches, start = TextRows(tmp_path, 5), [], 0
    while start < len(rows):  # as an evaluation reads them
        batches.append(rows.fetch(np.arange(start, min(start + batch_size, len(rows)))))
        start += len(batches[-1]["input_ids"])
    found = {key: [row.tolist() for batch in batches for row in batch[key]] for key in batches[0]}
    assert found["input_ids"] == [[3, 4, 5, 0, 6], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 2, 1]]
    assert found["labels"] == [[4, 5, 0, 6, 0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [2, 1, 0]]
    # The second, third and fourth document start at the targets 6, 1 and 2; the first document's start is no target.
    assert [[int(flag) for flag in row] for row in found["is_document_start"]] == [
        [0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 0],
    ]
    write_stream(tmp_path, [3])
    assert len(TextRows(tmp_path, 4)) == 0  # there is nothing to predict


def test_bins_are_single_positions_first_and_a_share_of_an_octave_later() -> None:
    assert position_bins(16).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]
    assert position_bins(1).tolist() == [1]
    assert len(position_bins(16384)) <= 64


@pytest.mark.parametrize("length", [1, 2, 9, 100, 2048])
def test_bins_cover_every_position_once(length: int) -> None:
    tally = PositionTally(length)
    tally.add(np.zeros((1, length)), np.ones((1, length), dtype=bool))
    curve = tally.values()
    covered = [p for start, end in zip(curve["start"], curve["end"], strict=True) for p in range(start, end + 1)]
    assert covered == list(range(1, length + 1))
    assert sum(curve["num_tokens"]) == length


def evaluate(model: Any, rows: Any, batch_size: int = 3, **options: Any) -> dict[str, Any]:
    job = EvaluationJob(model, rows, len(rows), EvaluationBatchSize(batch_size), "data mode", **options)
    return evaluate_perplexity(job).values


@pytest.fixture
def rows(tmp_path: Path) -> TextRows:
    """Rows of twelve tokens, the last one short, of documents shorter and longer than a row."""
    write_stream(tmp_path, random_documents([3, 1, 20, 9, 30, 2, 7]))
    return TextRows(tmp_path, 12)


def losses_one_by_one(model: Any, tokens: list[int], length: int) -> list[float]:
    """The loss of every token but the first, each from a pass of its own over what stands before it in its row."""
    losses = []
    for target in range(1, len(tokens)):
        start = (target - 1) // length * length
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens[start:target]])).logits[0, -1]
        losses.append(-float(logits.double().log_softmax(-1)[tokens[target]]))
    return losses


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("explicit", 12),
        ("explicit", 100),  # some positions are reached by no row
        ("gpt_neox", 5),
        ("gpt_neox", 12),
        ("gpt_neox", 39),  # two rows and no short one
        ("gpt_neox", 64),
    ],
)
def test_perplexity_equals_an_independent_pass_for_every_token(tmp_path: Path, kind: str, length: int) -> None:
    tokens = random_documents([3, 1, 20, 9, 30, 2, 7])
    write_stream(tmp_path, tokens)
    model = small_model(kind)
    losses = losses_one_by_one(model, tokens, length)
    inside = [loss for loss, before in zip(losses, tokens[:-1], strict=True) if before != END_OF_TEXT]
    values = evaluate(model, TextRows(tmp_path, length))
    assert (values["num_tokens"], values["num_document_starts"]) == (len(losses), 6)
    assert len(losses) == 3 + 1 + 20 + 9 + 30 + 2 + 7 + 7 - 1
    perplexities = [values["perplexity"], values["perplexity_within_documents"]]
    assert perplexities == pytest.approx([math.exp(np.mean(losses)), math.exp(np.mean(inside))], rel=1e-5)
    by_position = {p: losses[p - 1 :: length] for p in range(1, min(length, len(losses)) + 1)}
    curve = values["loss_by_position"]
    for start, end, loss, count in zip(*(curve[key] for key in ("start", "end", "loss", "num_tokens")), strict=True):
        in_bin = [loss for position in range(start, end + 1) for loss in by_position.get(position, [])]
        assert (count, loss) == (len(in_bin), pytest.approx(np.mean(in_bin), rel=2e-5) if in_bin else None)


def test_documents_of_a_stream_that_does_not_say_where_they_end_have_no_number(rows: TextRows) -> None:
    rows.end_of_text = None
    values = evaluate(small_model("gpt_neox"), rows)
    assert values["perplexity"] is not None
    assert (values["perplexity_within_documents"], values["num_document_starts"]) == (None, None)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_perplexity_and_cost_do_not_depend_on_the_batch_size(rows: TextRows, kind: str) -> None:
    model = small_model(kind)
    one, three, all_at_once = (evaluate(model, rows, size) for size in (1, 3, 64))
    assert [one["loss"], three["loss"]] == pytest.approx([all_at_once["loss"]] * 2, rel=1e-6)
    assert one["f_evaluations_per_token"] == all_at_once["f_evaluations_per_token"]


def test_long_vocabularies_never_have_the_logits_of_a_batch_at_once(
    rows: TextRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shapes = small_model("implicit"), []
    whole = evaluate(model, rows)
    monkeypatch.setattr("implicit_llm.evaluation.answers.LOSS_TOKENS", 15)
    model.lm_head.register_forward_hook(lambda module, given, logits: shapes.append(logits.shape[:2]))
    pieces = evaluate(model, rows)
    assert max(batch * length for batch, length in shapes) <= 15
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert pieces["loss_by_position"]["loss"] == pytest.approx(whole["loss_by_position"]["loss"], rel=1e-5)


def test_bf16_is_close_to_fp32_and_is_really_used(rows: TextRows) -> None:
    model = small_model("explicit")
    fp32, bf16 = (evaluate(model, rows, precision=precision)["loss"] for precision in ("fp32", "bf16"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.05)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a stream of 200 tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS)
    run_dir = tmp_path_factory.mktemp("data") / ROLE
    return finish(run_dir, "data", ROLE, {"kind": "token_stream"}, lambda work: write_stream(work, tokens, VOCAB))


def run_stage(folder: Path, text: Path, kind: str, lengths: list[int], **changes: Any) -> Path:
    summary = {"data": {"kind": "token_stream", "length": 16}, "tokens": 4096, "flops": 1.5e9}
    inputs = {"model": train_nothing(folder, kind, "text", VOCAB, summary), ROLE: text}
    config = {"kind": "perplexity", "modes": MODES, "lengths": lengths, **changes}
    return finished_runs.evaluate(stage, folder, "text-s7/free/perplexity", config, inputs)


def test_every_length_is_evaluated_in_every_mode_shortest_first_with_what_it_was_trained_on(
    tmp_path: Path, text: Path
) -> None:
    found = records(run_stage(tmp_path, text, "implicit", [32, 16]))
    # Of 200 tokens all but the first are predicted; in sequential mode those of the first two rows.
    assert [(record["length"], record["mode"], record["num_tokens"]) for record in found] == [
        (16, "simultaneous", 199),
        (16, "sequential", 2 * 16),
        (32, "simultaneous", 199),
        (32, "sequential", 2 * 32),
    ]
    record = found[0]
    expected = {"kind": "perplexity", "data": ROLE, "run": "text-implicit", "phase": "free", "seed": 7}
    expected |= {"is_implicit": True, "train_length": 16, "train_tokens": 4096, "train_flops": 1.5e9}
    assert {key: record[key] for key in expected} == expected
    assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))
    assert record["num_parameters"] > 1000
    assert 1 < record["f_evaluations_per_token"] <= 4


def test_a_model_read_as_trained_has_the_loss_of_its_training_pass(tmp_path: Path, text: Path) -> None:
    modes = [{"name": "as_trained", "eval_mode": "as_trained"}]
    (record,) = records(run_stage(tmp_path, text, "implicit", [199], modes=modes))
    folder = next((tmp_path / "train").rglob("model"))
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).train()
    row = torch.as_tensor(np.fromfile(next(text.rglob("tokens.bin")), dtype="<u2").astype(np.int64))[None]
    out = model(input_ids=row[:, :-1], labels=row[:, 1:], aligned=True)
    assert record["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert record["f_evaluations_per_token"] == pytest.approx(float(out.solver_stats.f_evaluations))
    assert (record["eval_mode"], record["eval_max_iter"], record["eval_tol"]) == ("as_trained", None, None)


def test_length_that_no_row_reaches_is_missing_with_a_warning(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = records(run_stage(tmp_path, text, "explicit", [16, 200]))
    assert short["perplexity"] > 1
    assert (long["length"], long["loss"], long["perplexity"], long["num_tokens"]) == (200, None, None, 0)
    assert long["loss_by_position"] is None
    assert "no row of 200 tokens" in caplog.text


def test_max_tokens_takes_the_first_rows_and_at_least_one(tmp_path: Path, text: Path) -> None:
    found = records(run_stage(tmp_path, text, "explicit", [16, 128], max_tokens=70))
    assert [record["num_tokens"] for record in found] == [4 * 16, 128]
