from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob
from implicit_llm.evaluation.kinds.perplexity import TextRows, evaluate_perplexity
from tests.unit.evaluation.small_models import small_model
from tests.unit.evaluation.small_streams import END_OF_TEXT, random_documents, write_stream


def evaluate(model: Any, rows: Any, batch_size: int = 3, **options: Any) -> Evaluation:
    return evaluate_perplexity(EvaluationJob(model, rows, len(rows), BatchSize(batch_size), "data mode", **options))


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


@pytest.mark.parametrize(("kind", "length"), [("explicit", 12), ("gpt_neox", 5), ("gpt_neox", 12), ("gpt_neox", 64)])
def test_perplexity_equals_an_independent_pass_for_every_token(tmp_path: Path, kind: str, length: int) -> None:
    tokens = random_documents([3, 1, 20, 9, 30, 2, 7])
    write_stream(tmp_path, tokens)
    model = small_model(kind)
    assert type(model).__module__.startswith("transformers") == (kind == "gpt_neox")
    losses = losses_one_by_one(model, tokens, length)
    inside = [loss for loss, before in zip(losses, tokens[:-1], strict=True) if before != END_OF_TEXT]
    values = evaluate(model, TextRows(tmp_path, length)).values
    assert values["num_tokens"] == len(losses) == 3 + 1 + 20 + 9 + 30 + 2 + 7 + 7 - 1
    assert values["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert values["num_document_starts"] == 6
    assert values["perplexity_within_documents"] == pytest.approx(math.exp(np.mean(inside)), rel=1e-5)
    by_position = {p: losses[p - 1 :: length] for p in range(1, min(length, len(losses)) + 1)}
    curve = values["loss_by_position"]
    for start, end, loss, count in zip(*(curve[key] for key in ("start", "end", "loss", "num_tokens")), strict=True):
        expected = [loss for position in range(start, end + 1) for loss in by_position.get(position, [])]
        assert count == len(expected)
        assert loss == (pytest.approx(np.mean(expected), rel=2e-5) if expected else None)


def test_documents_of_a_stream_that_does_not_say_where_they_end_have_no_number(tmp_path: Path) -> None:
    write_stream(tmp_path, random_documents([3, 9, 20]))
    rows = TextRows(tmp_path, 8)
    rows.end_of_text = None
    values = evaluate(small_model("gpt_neox"), rows).values
    assert values["perplexity"] is not None
    assert (values["perplexity_within_documents"], values["num_document_starts"]) == (None, None)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_perplexity_and_cost_do_not_depend_on_the_batch_size(rows: TextRows, kind: str) -> None:
    model = small_model(kind)
    one, three, all_at_once = (evaluate(model, rows, size).values for size in (1, 3, 64))
    assert one["loss"] == pytest.approx(all_at_once["loss"], rel=1e-6)
    assert three["loss"] == pytest.approx(all_at_once["loss"], rel=1e-6)
    assert one["f_evaluations_per_token"] == all_at_once["f_evaluations_per_token"]


def test_long_vocabularies_never_have_the_logits_of_a_batch_at_once(
    rows: TextRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shapes = small_model("implicit"), []
    whole = evaluate(model, rows).values
    monkeypatch.setattr("implicit_llm.evaluation.answers.LOSS_TOKENS", 15)
    model.lm_head.register_forward_hook(lambda module, given, logits: shapes.append(logits.shape[:2]))
    pieces = evaluate(model, rows).values
    assert max(batch * length for batch, length in shapes) <= 15
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert pieces["loss_by_position"]["loss"] == pytest.approx(whole["loss_by_position"]["loss"], rel=1e-5)


def test_modes_of_converged_models_agree_and_sequential_costs_are_counted(tmp_path: Path) -> None:
    write_stream(tmp_path, random_documents([3, 9, 2]))
    model, rows = small_model("implicit"), TextRows(tmp_path, 8)
    with torch.no_grad():
        model.backbone.layers[0].mixer.in_proj.g.mul_(0.2)  # weaker feedback, so that the iteration contracts
    losses = {}
    for mode in ("simultaneous", "blockwise", "sequential"):
        model.solver = replace(
            model.solver, eval_mode=mode, eval_block_len=4, tol=1e-5, eval_max_iter=200, eval_stop="token"
        )
        values = evaluate(model, rows).values
        losses[mode] = values["loss"]
        assert values["f_evaluations_per_token"] > 1
        assert values["residual"] < 1e-5
        assert values["unconverged_share"] == 0
    assert losses["sequential"] == pytest.approx(losses["simultaneous"], rel=1e-3)
    assert losses["blockwise"] == pytest.approx(losses["simultaneous"], rel=1e-3)


def test_bf16_is_close_to_fp32_and_is_really_used(rows: TextRows) -> None:
    model = small_model("explicit")
    fp32, bf16 = (evaluate(model, rows, precision=precision).values["loss"] for precision in ("fp32", "bf16"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.05)
