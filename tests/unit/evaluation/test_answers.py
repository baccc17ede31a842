"""What every evaluation that reads rows of tokens shares."""

from __future__ import annotations

import numpy as np
import pytest

from implicit_llm.evaluation.answers import BatchSize, EvaluationJob, UnknownToken, answers
from tests.unit.evaluation.small_models import VOCAB, Rows, small_model


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
