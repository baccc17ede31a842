from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob
from implicit_llm.evaluation.kinds.catbabi import evaluate_catbabi
from implicit_llm_data.shards import IGNORED_LABEL
from tests.unit.evaluation.small_models import Rows, small_model
from tests.unit.evaluation.stand_ins import stand_in

QUESTION = 2  # the token of "?"
# Two rows of a made-up vocabulary; the stand-in answers every token x with (x + 1) % 6, so after "?" it says 3.
INPUTS = np.array([[0, 1, 2, 3, 2, 4], [2, 5, 2, 3, 2, 0]])
LABELS = np.array([[1, 2, 3, 2, 4, 5], [5, 2, 3, 2, IGNORED_LABEL, IGNORED_LABEL]])
TASKS = np.array([[1, 1, 1, 7, 7, 7], [7, 7, 7, 7, 0, 0]])


def evaluate(model: Any, rows: Any, batch_size: int = 3, question_id: int = QUESTION) -> Evaluation:
    job = EvaluationJob(model, rows, len(rows), BatchSize(batch_size), "data mode")
    return evaluate_catbabi(job, question_id)


def test_accuracy_at_questions_equals_the_count_by_hand() -> None:
    values = evaluate(stand_in(), Rows(input_ids=INPUTS, labels=LABELS, task=TASKS)).values
    # Answers: row 0 has 3 (right, task 1) and 4 (wrong, task 7); row 1 has 5 (wrong), 3 (right), and one padded.
    assert values["num_questions_by_task"] == {"1": 1, "7": 3}
    assert values["accuracy_by_task"] == {"1": 1.0, "7": pytest.approx(1 / 3)}
    assert values["num_questions"] == 4
    assert values["accuracy"] == 0.5
    # Next words: 0->1, 1->2, 2->3 right, 3->2 and 2->4 wrong, 4->5 right; 2->5, 5->2 wrong, 2->3 right, 3->2 wrong.
    assert values["lm_accuracy"] == 0.5
    assert values["num_words_by_task"] == {"1": 3, "7": 7}
    assert values["lm_accuracy_by_task"] == {"1": 1.0, "7": pytest.approx(2 / 7)}
    # The stand-in has the logit 1 for its answer and 0 for the five others.
    right, wrong = math.log(math.e + 5) - 1, math.log(math.e + 5)
    expected = {"1": math.exp(right), "7": math.exp((2 * right + 5 * wrong) / 7)}
    assert values["lm_perplexity_by_task"] == pytest.approx(expected, rel=1e-6)
    assert values["lm_perplexity"] == pytest.approx(math.exp((right + wrong) / 2), rel=1e-6)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_accuracies_and_perplexity_equal_a_slow_loop_over_rows_and_words(kind: str) -> None:
    model, random = small_model(kind), np.random.default_rng(1)
    labels, tasks = random.integers(0, 12, (7, 12)), random.integers(1, 4, (7, 12))
    labels[random.random((7, 12)) < 0.2] = IGNORED_LABEL
    rows = Rows(labels=labels, task=tasks)
    total, num_words, right_words = 0.0, 0, 0
    asked, right = dict.fromkeys("123", 0), dict.fromkeys("123", 0)
    for inputs, row, task in zip(rows.columns["input_ids"], labels, tasks, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.as_tensor(inputs)[None]).logits[0].double()
        for position in np.flatnonzero(row != IGNORED_LABEL):
            is_right = int(logits[position].argmax()) == row[position]
            total -= float(logits[position].log_softmax(-1)[row[position]])
            num_words, right_words = num_words + 1, right_words + is_right
            if inputs[position] == QUESTION:
                asked[str(task[position])] += 1
                right[str(task[position])] += is_right
    for batch_size in (1, 64):
        values = evaluate(model, rows, batch_size).values
        assert values["num_questions_by_task"] == {task: count for task, count in asked.items() if count}
        assert values["accuracy_by_task"] == {task: right[task] / count for task, count in asked.items() if count}
        assert values["lm_accuracy"] == right_words / num_words
        assert values["lm_perplexity"] == pytest.approx(math.exp(total / num_words), rel=1e-5)
