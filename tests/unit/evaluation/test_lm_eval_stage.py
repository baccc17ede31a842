"""The stage in its frame, on the local tasks and untrained models."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from implicit_llm.evaluation.kinds import lm_eval as stage
from implicit_llm.evaluation.lm_eval_harness import command_line
from implicit_llm.evaluation.lm_eval_harness.tasks import TaskError, file_digests, load_tasks
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation.finished_runs import records, request
from tests.unit.evaluation.harness_models import LOCAL_FOLDER, LOCAL_TASKS, harness_model, tokenizer_in

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

    def body(context: StageContext) -> StageResult:
        tokenizer_in(context.work)
        return StageResult(["tokenizer.json"], {"end_of_text_id": 0})

    run_dir = tmp_path_factory.mktemp("data") / "text-tokenizer"
    run_stage(request(run_dir, "data", "text-tokenizer", {"kind": "tokenizer"}, {}), body)
    return run_dir


def train(folder: Path, kind: str = "implicit") -> Path:
    """The run directory of a training phase that left an untrained model."""

    def body(context: StageContext) -> StageResult:
        harness_model("llama3", kind).save_pretrained(context.work / "model")
        return StageResult(["model"], {"data": {"kind": "token_stream", "length": 16}, "tokens": 4096})

    run_dir = folder / "train" / kind
    run_stage(request(run_dir, "train", f"text-{kind}-s7/free", {"seed": 7}, {}), body)
    return run_dir


def evaluate(folder: Path, inputs: dict[str, Path], config: dict[str, Any]) -> Path:
    run_dir = folder / "evaluate"
    run_stage(request(run_dir, "evaluate", "text-s7/free/lm-eval", config, inputs), stage.run)
    return run_dir


@pytest.fixture(scope="module")
def implicit_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    return evaluate(folder, {"model": train(folder), "tokenizer": tokenizer}, config_of())


def test_every_task_is_asked_in_every_mode(implicit_run: Path) -> None:
    found = [(record["task"], record["mode"], record["num_documents"]) for record in records(implicit_run)]
    assert found == [(task, mode["name"], 4) for task in LOCAL_TASKS for mode in MODES]


def test_records_hold_metrics_with_their_errors_and_what_makes_them_comparable(implicit_run: Path) -> None:
    by_task = {record["task"]: record for record in records(implicit_run) if record["mode"] == "blockwise"}
    assert {task: sorted(record["metrics"]) for task, record in by_task.items()} == {
        "local_last_word": ["acc", "perplexity"],
        "local_continuation": ["acc", "acc_norm"],
        "local_cloze": ["acc"],
    }
    record = by_task["local_last_word"]
    assert record["metrics"]["perplexity"] > 1
    assert record["stderr"]["perplexity"] > 0
    assert record["higher_is_better"] == {"perplexity": False, "acc": True}
    expected = {"kind": "lm_eval", "data": "local_last_word", "run": "text-implicit", "phase": "free", "seed": 7}
    expected |= {"length": None, "eval_mode": "blockwise", "eval_max_iter": 4, "sweep": None, "num_fewshot": 0}
    expected |= {"task_version": 1.0, "precision": "fp32", "limit": 4, "nonfinite_share": 0.0, "train_tokens": 4096}
    assert {key: record[key] for key in expected} == expected
    assert record["harness_version"].startswith("0.")
    assert len(record["task_hash"]) == 64
    assert 1 < record["f_evaluations_per_token"] <= 4
    headline = Manifest.read(implicit_run / "manifest.json").summary["metrics"]
    assert headline["local_cloze"]["blockwise"] == by_task["local_cloze"]["metrics"]


def test_a_model_with_its_own_tokenizer_is_asked_with_that(tmp_path: Path, tokenizer: Path) -> None:
    def body(context: StageContext) -> StageResult:
        harness_model("llama3", "explicit").save_pretrained(context.work / "model")
        tokenizer_in(context.work / "model")
        return StageResult(["model"], {})

    peer = tmp_path / "peer"
    run_stage(request(peer, "checkpoint", "peer", {"path": "there"}, {}), body)
    config = config_of(tasks=["local_cloze"])
    own = records(evaluate(tmp_path / "own", {"model": peer}, config))
    trained = train(tmp_path, "explicit")
    same = records(evaluate(tmp_path / "same", {"model": trained, "tokenizer": tokenizer}, config))
    assert (own[0]["run"], own[0]["mode"]) == ("peer", "parallel")
    assert own[0]["metrics"] == same[0]["metrics"]
    with pytest.raises(Exception, match="no tokenizer there; name one") as error:
        evaluate(tmp_path / "none", {"model": trained}, config)
    assert "\n" not in str(error.value)


def test_data_that_was_not_fetched_is_told_in_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: owner/not-fetched\noutput_type: loglikelihood\ntest_split: test\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: ' x'\nmetadata: {version: 1.0}\n"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(TaskError, match=r"task far: its data .*owner/not-fetched.*`implicit-llm prefetch") as error:
        load_tasks(LmEvalConfig("lm_eval", (), ("far",), task_path=str(tmp_path)))
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


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
def own_process_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness's command line sets up logging, arguments and an environment variable for its process."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM", "true"))
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def quick_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes most of its time here: an index of its own 14,000 tasks, 100,000 draws, a list of packages."""
    process = evaluator._process_results
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setattr(evaluator, "_process_results", lambda acc, groups, _: process(acc, groups, DRAWS))
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)


@pytest.mark.usefixtures("own_process_state", "quick_harness")
def test_the_command_line_of_the_harness_gives_exactly_the_numbers_of_the_rule(tmp_path: Path, tokenizer: Path) -> None:
    trained, out = train(tmp_path), tmp_path / "out"
    settings = f"pretrained={trained},tokenizer={tokenizer},eval_mode=blockwise,eval_max_iter=4,eval_block_len=8"
    words = ["--model", "hf", "--model_args", settings, "--tasks", ",".join(LOCAL_TASKS), "--batch_size", "4"]
    words += ["--limit", "8", "--include_path", str(LOCAL_FOLDER), "--output_path", str(out), "--log_samples"]
    command_line.main(words)
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
    assert command_line.without_padding(given) == handed_over
