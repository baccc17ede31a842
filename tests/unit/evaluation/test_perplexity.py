from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import Evaluation, EvaluationJob
from implicit_llm.evaluation.batch_size import BatchSize
from implicit_llm.evaluation.perplexity import evaluate_perplexity
from tests.unit.evaluation.small_models import Rows, small_model
from tests.unit.evaluation.stand_ins import Problems, stand_in


def evaluate(model: Any, rows: Any, batch_size: int = 3, **options: Any) -> Evaluation:
    return evaluate_perplexity(EvaluationJob(model, rows, len(rows), BatchSize(batch_size), "data mode", **options))


@pytest.mark.parametrize("kind", ["implicit", "explicit", "gpt_neox"])
def test_perplexity_equals_that_of_hugging_faces_loss_row_by_row(kind: str) -> None:
    model, rows = small_model(kind), Rows()
    total = num_tokens = 0.0
    for row in rows.columns["input_ids"]:
        input_ids = torch.as_tensor(row)[None]
        with torch.no_grad():
            total += float(model(input_ids=input_ids, labels=input_ids).loss) * (len(row) - 1)
        num_tokens += len(row) - 1
    values = evaluate(model, rows).values
    assert values["num_tokens"] == num_tokens == 7 * 11
    assert values["loss"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(total / num_tokens), rel=1e-5)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_perplexity_and_cost_do_not_depend_on_the_batch_size(kind: str) -> None:
    model, rows = small_model(kind), Rows()
    one, three, all_at_once = (evaluate(model, rows, size).values for size in (1, 3, 64))
    assert one["loss"] == pytest.approx(all_at_once["loss"], rel=1e-6)
    assert three["loss"] == pytest.approx(all_at_once["loss"], rel=1e-6)
    assert one["f_evaluations_per_token"] == all_at_once["f_evaluations_per_token"]


def test_token_is_predicted_from_those_before_it_in_its_own_row() -> None:
    model, rows = small_model("explicit"), Rows()
    before = evaluate(model, rows).values["loss"]
    changed = rows.columns["input_ids"].copy()
    changed[:, 0] = (changed[:, 0] + 1) % Rows.vocab_size
    first_token_differs = evaluate(model, Rows(input_ids=changed)).values["loss"]
    shuffled = evaluate(model, Rows(input_ids=rows.columns["input_ids"][::-1])).values["loss"]
    assert first_token_differs != before
    assert shuffled == pytest.approx(before, rel=1e-6)


def test_modes_of_converged_models_agree_and_sequential_costs_are_counted() -> None:
    model, rows = small_model("implicit"), Rows()
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


def test_explicit_model_has_no_residual_and_costs_one_evaluation_a_token() -> None:
    values = evaluate(small_model("explicit"), Rows()).values
    assert (values["f_evaluations_per_token"], values["residual"], values["unconverged_share"]) == (1.0, None, None)


def test_long_rows_are_scored_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small_model("explicit"), Rows()
    whole = evaluate(model, rows).values["loss"]
    monkeypatch.setattr("implicit_llm.evaluation.answers.LOSS_TOKENS", 15)
    assert evaluate(model, rows).values["loss"] == pytest.approx(whole, rel=1e-6)


def test_bf16_is_close_to_fp32_and_is_really_used() -> None:
    model, rows = small_model("explicit"), Rows()
    fp32, bf16 = (evaluate(model, rows, precision=precision).values["loss"] for precision in ("fp32", "bf16"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.05)


@pytest.mark.parametrize("change", [{"nan_at": 5}, {"raises_non_finite": True}])
def test_non_finite_answers_give_no_perplexity_and_never_zero(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    values = evaluate(stand_in(**change), Problems()).values
    assert values["loss"] is None
    assert values["perplexity"] is None
    assert values["nonfinite_share"] > 0
    assert "no perplexity is reported" in caplog.text


def test_batch_is_halved_until_it_fits_and_every_row_counts_once() -> None:
    problems = Problems()
    assert evaluate(stand_in(fits=3), problems, batch_size=8).values["num_tokens"] == 10 * 11
    assert problems.fetched == [8, 4, 2, 2, 2, 2, 2]


def test_progress_ends_with_a_line_of_the_final_numbers(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows()
    with caplog.at_level(logging.INFO):
        loss = evaluate(small_model("explicit"), rows).values["loss"]
    assert f"data mode: 7/7 samples, loss {loss:.4f}, 1.0 f-evaluations per token" in caplog.text


def test_sharpened_models_are_no_uniform_guessers() -> None:
    assert abs(evaluate(small_model("explicit"), Rows()).values["loss"] - np.log(Rows.vocab_size)) > 0.05
