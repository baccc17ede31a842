"""The harness's language model: a request's answer depends on nothing but itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

from implicit_llm.evaluation.answers import BatchSize, EvaluationOutOfMemory, UnknownToken
from implicit_llm.evaluation.lm_eval_harness.model import ImplicitLM, SolverSettingError
from implicit_llm.evaluation.lm_eval_harness.tokenizer import TokenizerMissing
from implicit_llm.solver.stats import NonFiniteState
from tests.unit.evaluation.harness_models import byte_tokenizer, harness_model, harness_tokenizer, requests

FAMILIES, MODES = ("mamba2", "llama3"), ("simultaneous", "blockwise", "sequential")


def logprobs(lm: HFLM, asked: list[Any] | None = None) -> np.ndarray:
    answers = lm.loglikelihood(asked or requests(), disable_tqdm=True)
    return np.array([logprob for logprob, _ in answers])


def harness(model: Any, batch_size: int) -> HFLM:
    """The harness's own class."""
    return HFLM(model, tokenizer=harness_tokenizer(), backend="causal", batch_size=batch_size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_in_a_batch_is_that_to_the_request_alone(family: str, mode: str) -> None:
    model, asked = harness_model(family, eval_mode=mode), requests(8)
    alone = logprobs(ImplicitLM(model, harness_tokenizer(), batch_size=1), asked)
    together = logprobs(ImplicitLM(model, harness_tokenizer(), batch_size=8), asked)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(alone, logprobs(harness(model, 1), asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_generated_in_a_batch_is_that_of_the_prompt_alone(family: str) -> None:
    """At the default tolerance, in blocks; the harness pads the prompts of a batch on the left."""
    prompts = (
        "def read(self):",
        "return",
        "for key in self._data: yield",
        "if x",
        "a",
        "import os, sys; from",
        "go on",
    )
    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [SimpleNamespace(args=(prompt, until), task_name="task") for prompt in prompts]
    model = harness_model(family, eval_mode="blockwise")
    model.generation_config.eos_token_id = None  # as a tokenizer does not always come with its model
    alone, together = (
        ImplicitLM(model, harness_tokenizer(), batch_size=size).generate_until(asked, disable_tqdm=True)
        for size in (1, 8)
    )
    assert together == alone
    assert len(set(alone)) > 1


def test_nothing_is_generated_with_a_tokenizer_that_names_no_end_of_a_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    with pytest.raises(TokenizerMissing, match="names no token that ends a text"):
        ImplicitLM(harness_model("mamba2"), tokenizer).generate_until([])


def test_no_text_is_generated_in_the_mode_as_trained_whose_batch_is_that_of_the_training_rule() -> None:
    lm = ImplicitLM(harness_model("mamba2", eval_mode="as_trained", stop="batch"), harness_tokenizer())
    assert lm.batches.is_fixed
    with pytest.raises(SolverSettingError, match="as_trained leaves no state to generate text from; use blockwise"):
        lm.generate_until([])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["simultaneous", "blockwise"])
def test_the_padding_of_the_harness_moves_answers_of_an_implicit_model(family: str, mode: str) -> None:
    """Why the class exists; when this fails, the harness has stopped padding, and the class can go."""
    model = harness_model(family, eval_mode=mode)
    assert np.abs(logprobs(harness(model, 8)) - logprobs(harness(model, 1))).max() > 1e-3


def test_answers_to_one_task_do_not_depend_on_another_task_asked_with_it() -> None:
    """Exactly: with the rule "batch" the sequences of a batch decide together when to stop."""
    model = harness_model("mamba2", eval_mode="simultaneous", eval_stop="batch")
    first, second = requests(task="first"), requests(9, task="second")
    lm = ImplicitLM(model, harness_tokenizer(), batch_size=4)
    mixed = [request for pair in zip(second, first, strict=False) for request in pair] + first[len(second) :]
    of_first = [request.task_name == "first" for request in mixed]
    np.testing.assert_array_equal(logprobs(lm, mixed)[of_first], logprobs(lm, first))


def test_memory_that_runs_out_halves_the_batch_and_changes_no_answer() -> None:
    model = harness_model("llama3", eval_mode="blockwise")
    alone = ImplicitLM(model, harness_tokenizer(), batch_size=1)
    expected = logprobs(alone)
    lm = ImplicitLM(model, harness_tokenizer(), batch_size=8)
    call = lm._model_call

    def small_memory(inps: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(inps) > 2:
            call(inps, **options)  # has counted the batch before the memory ran out
            raise torch.OutOfMemoryError("out of memory")
        return call(inps, **options)

    lm._model_call = small_memory  # type: ignore[method-assign]
    np.testing.assert_allclose(logprobs(lm), expected, rtol=1e-5, atol=1e-4)
    assert lm.cost.solver.num_tokens == alone.cost.solver.num_tokens  # what was tried again counts once
    assert lm.batches.size == 2
    lm.batches = BatchSize(8, is_fixed=True)
    with pytest.raises(EvaluationOutOfMemory, match="stopping rule"):
        logprobs(lm)


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused() -> None:
    model = harness_model("mamba2", "explicit")
    model.config.vocab_size = 60
    with pytest.raises(UnknownToken, match=r"tokenizer: the data has token .* and the model knows 60"):
        logprobs(ImplicitLM(model, harness_tokenizer(), batch_size=4))


def test_an_iteration_that_diverges_gives_no_number_and_is_counted() -> None:
    lm = ImplicitLM(harness_model("llama3"), harness_tokenizer(), batch_size=4)
    call, asked = lm._model_call, requests()
    longest = max(len("".join(request.args)) for request in asked) - 1

    def diverging(inps: torch.Tensor, **options: Any) -> torch.Tensor:
        if inps.shape[1] == longest:
            raise NonFiniteState("the iteration became NaN")
        return call(inps, **options)

    lm._model_call = diverging  # type: ignore[method-assign]
    is_lost = np.isnan(logprobs(lm, asked))
    assert is_lost.tolist() == [len("".join(request.args)) == longest + 1 for request in asked]
    assert (lm.cost.num_nonfinite, lm.cost.num_requests) == (is_lost.sum(), len(asked))


def test_solver_settings_change_the_saved_ones_and_explicit_models_have_none() -> None:
    model = harness_model("mamba2")
    lm = ImplicitLM(model, harness_tokenizer(), eval_mode="sequential", eval_max_iter=5, eval_tol=0.2)
    solver = lm.model.solver
    assert (solver.eval_mode, solver.eval_max_iter, solver.tol, solver.eval_block_len) == ("sequential", 5, 0.2, 8)
    with pytest.raises(SolverSettingError, match="eval_tol: the model is explicit"):
        ImplicitLM(harness_model("mamba2", "explicit"), harness_tokenizer(), eval_tol=0.1)
