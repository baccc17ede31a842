"""What every evaluation that reads rows of tokens shares."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from implicit_llm.evaluation.answers import BatchSize, EvaluationJob, UnknownToken, answers
from implicit_llm.evaluation.kinds.catbabi import AnswerTally, evaluate_catbabi
from implicit_llm.evaluation.kinds.perplexity import PerplexityTally, evaluate_perplexity
from implicit_llm.evaluation.kinds.word_problem import AccuracyTally, evaluate_word_problem
from tests.unit.evaluation.small_models import VOCAB, Rows, small_model
from tests.unit.evaluation.stand_ins import Problems, stand_in


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_a_token_that_the_model_does_not_know_is_named(column: str) -> None:
    rows = Rows(**{column: np.full((7, 12), VOCAB)})
    job = EvaluationJob(small_model("gpt_neox"), rows, 2, BatchSize(2), "here")
    with pytest.raises(UnknownToken, match=f"here: the data has token {VOCAB} and the model knows {VOCAB};"):
        next(answers(job, lambda out, batch: out))


def test_so_it_is_before_something_else_is_asked_in_place_of_the_model() -> None:
    job = EvaluationJob(small_model("implicit"), Rows(input_ids=np.full((7, 12), VOCAB)), 1, BatchSize(1), "here")
    with pytest.raises(UnknownToken):
        next(answers(job, lambda out, batch: out, ask=pytest.fail))


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
    found = evaluate(EvaluationJob(stand_in(**change), Problems(), 10, BatchSize(3), "data mode")).values
    assert {found[key] for key in tally.measures} == {None}
    assert found["nonfinite_share"] > 0
    assert "sequences are not finite: no result is reported" in caplog.text
    assert (found["f_evaluations_per_token"] is None) is ("raises_non_finite" in change)
