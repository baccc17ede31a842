"""The harness: a request's answer depends on nothing but itself; the stage in its frame; and the local tasks."""

import argparse
import dataclasses
import inspect
import json
import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from implicit_llm.evaluation import lm_eval_harness
from implicit_llm.evaluation.answers import GOOD_BATCHES, EvaluationBatchSize, EvaluationOutOfMemory, UnknownToken
from implicit_llm.evaluation.kinds import lm_eval as stage
from implicit_llm.evaluation.kinds.lm_eval import TaskError, load_tasks
from implicit_llm.evaluation.lm_eval_harness import (
    ImplicitLM,
    SolverSettingError,
    StaleAnswers,
    TokenizerMissing,
    load_tokenizer,
)
from implicit_llm.solver.stats import NonFiniteState
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.places import TASK_FOLDERS, file_digests
from implicit_llm_jobs.stage import run_stage
from tests.refusals import refused
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import finish, records, request, small_model, summary

END_OF_TEXT = "<|endoftext|>"
VOCAB = 257
LOCAL_TASKS = ("local_last_word", "local_continuation", "local_cloze")
LOCAL_FOLDER = TASK_FOLDERS / "local"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; the first one ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {END_OF_TEXT: 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_in(folder: Path) -> list[str]:
    """Write a tokenizer.json, as a data job leaves it; its name."""
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return ["tokenizer.json"]


def harness_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)


def harness_model(family: str, kind: str = "implicit", **solver: Any) -> Any:
    """An untrained model with sharpened outputs, so that answers differ; `solver` changes its evaluation."""
    model = small_model(kind, VOCAB, 2, family)
    if kind == "implicit":
        model.solver = dataclasses.replace(model.solver, **{"eval_max_iter": 24, "eval_block_len": 8} | solver)
    return model


def requests(count: int = 12, task: str = "task") -> list[Any]:
    """Requests of three lengths, the last two of which differ in their last token only."""
    texts = ["def read(self):", "return None", "for key in self._data:"]
    pairs = [(texts[i % 3], f" {chr(97 + i)}{chr(122 - i)}{chr(97 + i)}") for i in range(count - 2)]
    pairs += [("if x is", " A"), ("if x is", " B")]
    return [SimpleNamespace(args=pair, task_name=task) for pair in pairs]


FAMILIES = ("mamba2", "llama3")


def logprobs(lm: HFLM, asked: list[Any] | None = None) -> np.ndarray:
    return np.array([logprob for logprob, _ in lm.loglikelihood(asked or requests(), disable_tqdm=True)])


def harness(model: Any, batch_size: int) -> HFLM:
    """The harness's own class."""
    return HFLM(model, tokenizer=harness_tokenizer(), backend="causal", batch_size=batch_size)


@pytest.mark.parametrize("mode", ["simultaneous", "blockwise", "sequential"])
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


def test_a_tokenizer_without_any_token_that_begins_or_ends_a_text_is_refused() -> None:
    with pytest.raises(TokenizerMissing, match=r"no token that begins or ends a text, .*; set its eos_token"):
        ImplicitLM(harness_model("mamba2"), PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()))


def test_kernels_are_only_for_a_model_that_is_loaded_here() -> None:
    with pytest.raises(SolverSettingError, match="kernels: only for a model that is loaded here"):
        ImplicitLM(harness_model("mamba2"), harness_tokenizer(), kernels="torch")


def test_nothing_is_generated_without_an_end_of_a_text_or_in_a_mode_that_leaves_no_state() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="a")
    with pytest.raises(TokenizerMissing, match="names no token that ends a text"):
        ImplicitLM(harness_model("mamba2"), tokenizer).generate_until([])
    lm = ImplicitLM(harness_model("mamba2", eval_mode="as_trained", stop="batch"), harness_tokenizer())
    assert lm.batches.is_fixed  # as the training rule has it
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
    lm._model_call = call  # type: ignore[method-assign]
    for _ in range(2 * GOOD_BATCHES):
        np.testing.assert_allclose(logprobs(lm), expected, rtol=1e-5, atol=1e-4)
    assert lm.batches.size == 8
    lm._model_call = small_memory  # type: ignore[method-assign]
    lm.batches = EvaluationBatchSize(8, is_fixed=True)
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


def test_a_generation_that_diverges_gives_an_empty_text_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = harness_model("llama3")
    generate, prompts = model.generate, ["a", "for key in"]

    def diverging(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        if input_ids.shape[1] == len(prompts[1]):
            raise NonFiniteState("the iteration became NaN")
        return generate(input_ids, **options)

    monkeypatch.setattr(model, "generate", diverging)
    lm = ImplicitLM(model, harness_tokenizer(), batch_size=1)
    until = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}
    asked = [SimpleNamespace(args=(prompt, until), task_name="task") for prompt in prompts]
    first, second = lm.generate_until(asked, disable_tqdm=True)
    assert (bool(first), second) == (True, "")
    assert (lm.cost.num_nonfinite, lm.cost.num_requests) == (1, 2)


def test_solver_settings_reach_the_model_inside_a_peft_model() -> None:
    alone, inside = (harness_model("mamba2", eval_block_len=4) for _ in range(2))
    adapted = get_peft_model(inside, LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM"))
    settings = {"eval_mode": "sequential", "eval_max_iter": 2}
    found = [logprobs(ImplicitLM(it, harness_tokenizer(), batch_size=4, **settings)) for it in (alone, adapted)]
    assert (inside.solver.eval_mode, inside.solver.eval_max_iter) == ("sequential", 2)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_solver_settings_change_the_saved_ones_and_explicit_models_have_none() -> None:
    model = harness_model("mamba2")
    lm = ImplicitLM(model, harness_tokenizer(), eval_mode="sequential", eval_max_iter=5, eval_tol=0.2)
    solver = lm.model.solver
    assert (solver.eval_mode, solver.eval_max_iter, solver.tol, solver.eval_block_len) == ("sequential", 5, 0.2, 8)
    with pytest.raises(SolverSettingError, match="eval_tol: the model is explicit"):
        ImplicitLM(harness_model("mamba2", "explicit"), harness_tokenizer(), eval_tol=0.1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eval_max_iter": None}, "eval_max_iter: None changes nothing"),
        (
            {"eval_mode": "as_trained", "eval_tol": 0.1},
            "eval_tol: the mode as_trained takes all settings from training",
        ),
        ({"eval_stop": "tokens"}, "eval_stop: there is no 'tokens'; did you mean 'token'"),
    ],
)
def test_a_solver_setting_that_would_change_nothing_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ImplicitLM(harness_model("mamba2"), harness_tokenizer(), **settings)


def test_a_run_directory_without_a_tokenizer_is_refused_with_what_to_give(tmp_path: Path) -> None:
    data = finished_runs.word_problems(tmp_path / "data" / "s3-test")
    with pytest.raises(TokenizerMissing, match=r"tokenizer.json: is not there; give the run directory of a data set's"):
        load_tokenizer(data, tmp_path)


DRAWS = 1000
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 4},
    {"name": "blockwise", "eval_mode": "blockwise", "eval_max_iter": 4, "eval_block_len": 8},
]


def config_of(**changes: Any) -> dict[str, Any]:
    chosen = {"kind": "lm_eval", "modes": MODES, "tasks": list(LOCAL_TASKS), "task_path": "local"}
    return chosen | {"limit": 4, "bootstrap_draws": DRAWS} | changes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a tokenizer."""
    run_dir, summary = tmp_path_factory.mktemp("data") / "text-tokenizer", {"end_of_text_id": 0}
    return finish(run_dir, "data", "text-tokenizer", {"kind": "tokenizer"}, tokenizer_in, summary)


def save_model(work: Path, kind: str = "implicit") -> list[str]:
    harness_model("llama3", kind).save_pretrained(work / "model")
    return ["model"]


def train(folder: Path, kind: str = "implicit") -> Path:
    """The run directory of a training phase that left an untrained model."""
    summary = {"data": {"kind": "token_stream", "length": 16}, "tokens": 4096}
    write = partial(save_model, kind=kind)
    return finish(folder / "train" / kind, "train", f"text-{kind}-s7/free", {"seed": 7}, write, summary)


def evaluate(folder: Path, inputs: dict[str, Path], config: dict[str, Any]) -> Path:
    return finished_runs.evaluate(stage, folder, "text-s7/free/lm-eval", config, inputs)


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return evaluate(folder, {"model": train(folder), "tokenizer": tokenizer}, config_of())


def test_every_task_is_asked_in_every_mode_and_recorded_with_what_makes_it_comparable(implicit_run: Path) -> None:
    found = records(implicit_run)
    assert [(record["task"], record["mode"], record["num_documents"]) for record in found] == [
        (task, mode["name"], 4) for task in LOCAL_TASKS for mode in MODES
    ]
    by_task = {record["task"]: record for record in found if record["mode"] == "blockwise"}
    assert {task: sorted(record["metrics"]) for task, record in by_task.items()} == {
        "local_last_word": ["acc", "perplexity"],
        "local_continuation": ["acc", "acc_norm"],
        "local_cloze": ["acc"],
    }
    record = by_task["local_last_word"]
    assert record["metrics"]["perplexity"] > 1
    assert record["stderr"]["perplexity"] > 0
    expected = {"kind": "lm_eval", "data": "local_last_word", "run": "text-implicit", "phase": "free", "seed": 7}
    expected |= {"length": None, "eval_mode": "blockwise", "eval_max_iter": 4, "sweep": None, "num_fewshot": 0}
    expected |= {"task_version": 1.0, "precision": "fp32", "limit": 4, "nonfinite_share": 0.0, "train_tokens": 4096}
    expected |= {"higher_is_better": {"perplexity": False, "acc": True}}
    assert {key: record[key] for key in expected} == expected
    assert record["harness_version"].startswith("0.")
    assert len(record["task_hash"]) == 64
    assert 1 < record["f_evaluations_per_token"] <= 4
    assert summary(implicit_run)["metrics"]["local_cloze"]["blockwise"] == by_task["local_cloze"]["metrics"]


def test_a_model_with_its_own_tokenizer_is_asked_with_that(tmp_path: Path, tokenizer: Path) -> None:
    def write(work: Path) -> list[str]:
        files = save_model(work, "explicit")
        tokenizer_in(work / "model")
        return files

    peer = finish(tmp_path / "peer", "checkpoint", "peer", {"path": "there"}, write)
    config = config_of(tasks=["local_cloze"])
    own = records(evaluate(tmp_path / "own", {"model": peer}, config))
    trained = train(tmp_path, "explicit")
    same = records(evaluate(tmp_path / "same", {"model": trained, "tokenizer": tokenizer}, config))
    assert (own[0]["run"], own[0]["mode"]) == ("peer", "parallel")
    assert own[0]["metrics"] == same[0]["metrics"]
    with refused("no tokenizer there; name one"):
        evaluate(tmp_path / "none", {"model": trained}, config)


def test_a_model_in_a_folder_that_is_missing_is_refused_as_that(tmp_path: Path) -> None:
    for tokenizer in (None, harness_tokenizer()):
        with refused(f"pretrained: there is no folder {tmp_path}/fre; give a run directory"):
            ImplicitLM(str(tmp_path / "fre"), tokenizer)


def test_task_files_that_changed_after_planning_are_refused(tmp_path: Path) -> None:
    digests = file_digests(LOCAL_FOLDER)
    assert set(digests) >= {"cloze.yaml", "cloze.jsonl", "documents.py"}
    load_tasks(LmEvalConfig("lm_eval", (), ("local_cloze",), task_path="local", task_files=digests))
    changed = digests | {"cloze.jsonl": "0" * 64}
    with pytest.raises(TaskError, match=r"cloze.jsonl: changed after the workflow was planned"):
        load_tasks(LmEvalConfig("lm_eval", (), ("local_cloze",), task_path="local", task_files=changed))
    with pytest.raises(TaskError, match="neither nowhere nor"):
        load_tasks(LmEvalConfig("lm_eval", (), ("local_cloze",), task_path="nowhere"))


@pytest.fixture
def quick_harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what takes most of its time here: an index of its own 14,000 tasks, 100,000 draws, a list of packages.

    Its command line sets up logging and arguments for its process, which are put back.
    """
    process, root = evaluator._process_results, logging.getLogger()
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setattr(evaluator, "_process_results", lambda acc, groups, _: process(acc, groups, DRAWS))
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("quick_harness")
def test_the_command_line_of_the_harness_gives_exactly_the_numbers_of_the_rule(tmp_path: Path, tokenizer: Path) -> None:
    trained, out = train(tmp_path), tmp_path / "out"
    settings = f"pretrained={trained},tokenizer={tokenizer},eval_mode=blockwise,eval_max_iter=4,eval_block_len=8"
    words = ["--model", "hf", "--model_args", settings, "--tasks", ",".join(LOCAL_TASKS), "--batch_size", "4"]
    words += ["--limit", "8", "--include_path", str(LOCAL_FOLDER), "--output_path", str(out), "--log_samples"]
    lm_eval_harness.main(words)
    (written,) = out.rglob("results_*.json")
    theirs = json.loads(written.read_text())
    inputs, config = {"model": trained, "tokenizer": tokenizer}, config_of(limit=8, modes=MODES[1:])
    asked = request(tmp_path / "evaluate", "evaluate", "text-s7/free/lm-eval", config, inputs)
    asked.runtime["batch_size"] = 4
    run_stage(asked, stage.run)
    ours = records(tmp_path / "evaluate")
    assert [record["task"] for record in ours] == list(LOCAL_TASKS)
    for record in ours:
        task = theirs["results"][record["task"]]
        assert {metric: task[f"{metric},none"] for metric in record["metrics"]} == record["metrics"]
        assert {metric: task[f"{metric}_stderr,none"] for metric in record["stderr"]} == record["stderr"]
        assert theirs["task_hashes"][record["task"]] == record["task_hash"]
        assert theirs["versions"][record["task"]] == record["task_version"]


@pytest.mark.usefixtures("quick_harness")
def test_a_cache_of_answers_is_refused_since_it_would_outlive_the_model(tmp_path: Path, tokenizer: Path) -> None:
    words = ["--model", "hf", "--model_args", f"pretrained={train(tmp_path)},tokenizer={tokenizer}", "--limit", "2"]
    words += ["--tasks", "local_cloze", "--include_path", str(LOCAL_FOLDER), "--use_cache", str(tmp_path / "answers")]
    with pytest.raises(StaleAnswers, match=r"--use_cache: .* another model, or this one with other solver settings"):
        lm_eval_harness.main(words)


@pytest.mark.parametrize(
    ("given", "handed_over"),
    [
        (["--model", "hf", "--tasks", "x"], ["--model", "hf", "--tasks", "x", "--model", "implicit"]),
        (["run", "-M", "huggingface", "-t", "x"], ["run", "-M", "huggingface", "-t", "x", "--model", "implicit"]),
        (["--model=hf-auto", "--tasks", "x"], ["--model=hf-auto", "--tasks", "x", "--model", "implicit"]),
        (["--tasks", "x"], ["--tasks", "x", "--model", "implicit"]),
        (["--model", "vllm", "--tasks", "hf"], ["--model", "vllm", "--tasks", "hf"]),
        (["--config", "mine.yaml"], ["--config", "mine.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        ([], []),
    ],
)
def test_only_the_padding_model_is_replaced_in_the_arguments(given: list[str], handed_over: list[str]) -> None:
    assert lm_eval_harness.without_padding(given) == handed_over


class Reader(LM):
    """Predicts a character from how often it followed the ones before it in a text."""

    loglikelihood_rolling = generate_until = None

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts = Counter(text[at : at + width] for width in range(8) for at in range(len(text)))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        return [(sum(self.log_share(before, end, at) for at in range(len(end))), False) for before, end in pairs]

    def log_share(self, before: str, end: str, at: int) -> float:
        share, before = 1 / VOCAB, before + end[:at]
        for width in range(7):
            seen = before[len(before) - width :]
            share = (self.counts[seen + end[at]] + 2 * share) / (self.counts[seen] + 2)
        return math.log(share)


def scores(lm: LM, task: str) -> dict[str, float]:
    tasks = load_tasks(LmEvalConfig("lm_eval", (), (task,), task_path="local"))
    results = evaluator.evaluate(lm, {"tasks": tasks}, bootstrap_iters=0)
    assert results is not None
    return {key.partition(",")[0]: value for key, value in results["results"][task].items() if ",none" in key}


@pytest.fixture(scope="module")
def both() -> tuple[LM, LM]:
    """An untrained one, and one that has read some of the library that the documents imitate, and none of them."""
    library = "".join(inspect.getsource(module) for module in (argparse, subprocess, inspect))
    return ImplicitLM(harness_model("llama3", "explicit"), harness_tokenizer()), Reader(library[:60_000])


@pytest.mark.parametrize(("task", "chance"), [("local_continuation", 0.25), ("local_cloze", 0.5)])
def test_an_untrained_model_is_at_chance_and_one_that_read_the_library_above(
    both: tuple[LM, LM], task: str, chance: float
) -> None:
    untrained, read = (scores(lm, task) for lm in both)
    spread = (chance * (1 - chance) / 64) ** 0.5
    assert all(abs(untrained[metric] - chance) < 3 * spread for metric in untrained if "stderr" not in metric)
    assert read["acc"] > chance + 4 * spread


def test_the_last_word_is_less_of_a_surprise_to_a_model_that_read_the_library(
    both: tuple[LM, LM],
) -> None:
    untrained, read = (scores(lm, "local_last_word") for lm in both)
    assert read["perplexity"] < 0.01 * untrained["perplexity"]
