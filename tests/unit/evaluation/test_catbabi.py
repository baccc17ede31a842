"""CatbAbI: what is counted, and the stage in its frame on simulated stories and untrained models."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.evaluation.answers import BatchSize, EvaluationJob
from implicit_llm.evaluation.frame import EvaluateInputError
from implicit_llm.evaluation.kinds import catbabi as stage
from implicit_llm.evaluation.kinds.catbabi import carries_state, evaluate_catbabi
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_data.shards import IGNORED_LABEL, open_dataset
from implicit_llm_data.stages import babi_text
from implicit_llm_data.stages import catbabi as data_stage
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import Rows, StandIn, records, request, train_nothing

QUESTION = 2  # the token of "?"
# Two rows of a made-up vocabulary; the stand-in answers every token x with (x + 1) % 6, so after "?" it says 3.
INPUTS = np.array([[0, 1, 2, 3, 2, 4], [2, 5, 2, 3, 2, 0]])
LABELS = np.array([[1, 2, 3, 2, 4, 5], [5, 2, 3, 2, IGNORED_LABEL, IGNORED_LABEL]])
TASKS = np.array([[1, 1, 1, 7, 7, 7], [7, 7, 7, 7, 0, 0]])
VOCAB, LENGTH, ROLE = 192, 48, "babi-test"
TEXT: dict[str, Any] = {
    "kind": "babi_text", "source": "simulated", "seed": 0, "families": [1, 8], "story_length": 6,
    "stories": {"train": 4, "valid": 2, "test": 5},
}  # fmt: skip
ROWS: dict[str, Any] = {
    "kind": "catbabi", "collection": "simulated", "split": "test", "mode": "lm", "length": LENGTH,
    "vocab_size": VOCAB, "seed": 0, "drop_last_story": True,
}  # fmt: skip
MODES = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 3},
    {"name": "blockwise", "eval_mode": "blockwise", "eval_max_iter": 3, "eval_block_len": 16},
]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_accuracy_at_questions_equals_the_count_by_hand(batch_size: int) -> None:
    rows = Rows(input_ids=INPUTS, labels=LABELS, task=TASKS)
    values = evaluate_catbabi(EvaluationJob(StandIn(), rows, 2, BatchSize(batch_size), "data mode"), QUESTION).values
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


@pytest.fixture(scope="module")
def babi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("babi")
    run_stage(request(folder / "text", "data", "babi-text", TEXT, {}), babi_text.run)
    run_stage(request(folder / "test", "data", ROLE, ROWS, {"text": folder / "text"}), data_stage.run)
    return folder / "test"


def work_of(run_dir: Path) -> Path:
    return work_directory(run_dir, Manifest.read(run_dir / "manifest.json").fingerprint)


def evaluate(folder: Path, kind: str, data: Path, **settings: Any) -> Path:
    trained = train_nothing(folder, kind, "babi", VOCAB, {"data": {"kind": "catbabi", "length": LENGTH}})
    config = {"kind": "catbabi", "modes": MODES, **settings}
    return finished_runs.evaluate(stage, folder, f"babi-{kind}-s7/free/catbabi", config, {"model": trained, ROLE: data})


def test_records_name_the_protocol_and_are_made_in_every_mode(tmp_path: Path, babi: Path) -> None:
    run_dir = evaluate(tmp_path, "implicit", babi)
    found = records(run_dir)
    assert [record["mode"] for record in found] == ["simultaneous", "blockwise"]
    expected = {"kind": "catbabi", "protocol": "windowed", "data": ROLE, "run": "babi-implicit", "phase": "free"}
    expected |= {"seed": 7, "length": LENGTH, "num_layers": 1, "train_tokens": None, "train_flops": None}
    assert {key: found[0][key] for key in expected} == expected
    assert 0 <= found[0]["lm_accuracy"] <= 1 < found[0]["lm_perplexity"]
    assert sorted(Manifest.read(run_dir / "manifest.json").summary["accuracy"][ROLE]) == ["blockwise", "simultaneous"]


def test_data_without_a_vocabulary_is_refused_by_the_file(tmp_path: Path, babi: Path) -> None:
    dataset = open_dataset(work_of(babi))
    dataset.directory = tmp_path
    with pytest.raises(EvaluateInputError, match=r"vocabulary\.json: is missing"):
        stage.question_id(dataset)


def read_word_by_word(folder: Path, data: Path, most: int | None) -> tuple[list[dict[str, Any]], float]:
    """The words of the test set in file order, each after all before it: is it a question, is the answer right."""
    cache = ConvergedStateCache()
    words = json.loads((work_of(data) / "vocabulary.json").read_text())
    dataset = open_dataset(work_of(data))
    rows = dataset.fetch(np.arange(len(dataset)))
    model = AutoModelForCausalLM.from_pretrained(next((folder / "train").rglob("model")), local_files_only=True).eval()
    if model.solver is not None:
        model.solver = replace(model.solver, eval_mode="sequential", eval_max_iter=3)
    found, total = [], 0.0
    for token, label, task in zip(*(rows[name].ravel() for name in ("input_ids", "labels", "task")), strict=True):
        if token == 0 or len(found) == most:  # <pad>: the end of the last row
            break
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, 0].double()
        total -= float(logits.log_softmax(-1)[label])
        found.append({"is_question": words[token] == "?", "task": task, "is_right": int(logits.argmax()) == label})
    return found, total / len(found)


@pytest.mark.parametrize(("kind", "most"), [("explicit", None), ("implicit", 3 * LENGTH)], ids=["explicit", "implicit"])
def test_carried_accuracy_equals_a_count_over_one_pass_through_all_stories(
    tmp_path: Path, babi: Path, kind: str, most: int | None
) -> None:
    modes = [{"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 3}]
    settings = {"protocols": ["carried"], "carried_max_tokens": most, "modes": modes}
    (record,) = records(evaluate(tmp_path, kind, babi, **settings))
    found, loss = read_word_by_word(tmp_path, babi, most)
    questions = [word for word in found if word["is_question"]]
    assert record["protocol"] == "carried"
    assert record["num_words"] == len(found) >= 3 * LENGTH
    assert record["num_questions"] == len(questions)
    assert record["accuracy"] == np.mean([word["is_right"] for word in questions])
    assert record["lm_accuracy"] == np.mean([word["is_right"] for word in found])
    assert record["lm_perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    for task in sorted({word["task"] for word in found}):
        right = [word["is_right"] for word in found if word["task"] == task]
        assert record["lm_accuracy_by_task"][str(task)] == np.mean(right)


def test_both_protocols_are_named_and_differ_only_by_the_state_before_a_window(tmp_path: Path, babi: Path) -> None:
    modes = [{**MODES[1], "max_samples": 2}]
    run_dir = evaluate(tmp_path, "implicit", babi, protocols=["windowed", "carried"], modes=modes)
    found = {(record["protocol"], record["mode"]): record for record in records(run_dir)}
    assert sorted(found) == [("carried", "blockwise"), ("windowed", "blockwise")]
    assert {record["num_words"] for record in found.values()} == {2 * LENGTH}
    windowed, carried = found["windowed", "blockwise"], found["carried", "blockwise"]
    assert carried["lm_perplexity"] != windowed["lm_perplexity"]
    assert carried["lm_perplexity"] == pytest.approx(windowed["lm_perplexity"], rel=0.05)
    summary = Manifest.read(run_dir / "manifest.json").summary["accuracy"]
    assert sorted(summary) == [ROLE, f"{ROLE}.carried"]


def test_model_without_a_state_to_carry_has_no_number_in_that_protocol(
    tmp_path: Path, babi: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "carries_state", lambda model: False)
    windowed, carried = records(evaluate(tmp_path, "explicit", babi, protocols=["windowed", "carried"]))
    assert windowed["accuracy"] is not None
    assert (carried["protocol"], carried["accuracy"], carried["lm_perplexity"]) == ("carried", None, None)
    assert carried["num_questions"] is None
    assert "no state of fixed size" in caplog.text


def test_only_recurrent_models_have_a_state_to_carry() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1}
    attention = implicit_llm.load_config("llama3-130m-implicit", **sizes, num_attention_heads=2, intermediate_size=32)
    recurrent = implicit_llm.load_config("mamba2-state-tracking-implicit", **sizes, expand=2, head_dim=8, state_size=8)
    found = [carries_state(AutoModelForCausalLM.from_config(config)) for config in (attention, recurrent)]
    assert found == [False, True]
