"""The stage in its frame, on simulated CatbAbI and an untrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm.data.shards import open_dataset
from implicit_llm.data.stages import babi_text
from implicit_llm.data.stages import catbabi as data_stage
from implicit_llm.evaluation.inputs import EvaluateInputError
from implicit_llm.evaluation.stages import catbabi as stage
from implicit_llm.runs.manifest import Manifest
from implicit_llm.runs.run_directory import work_directory
from implicit_llm.runs.stage import run_stage
from tests.unit.evaluation.finished_runs import records, request, train_nothing

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


@pytest.fixture(scope="module")
def babi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("babi")
    run_stage(request(folder / "text", "data", "babi-text", TEXT, {}), babi_text.run)
    run_stage(request(folder / "test", "data", ROLE, ROWS, {"text": folder / "text"}), data_stage.run)
    return folder / "test"


def work_of(run_dir: Path) -> Path:
    return work_directory(run_dir, Manifest.read(run_dir / "manifest.json").fingerprint)


def evaluate(folder: Path, kind: str, data: Path) -> Path:
    trained = train_nothing(folder, kind, "babi", VOCAB, {"data": {"kind": "catbabi", "length": LENGTH}})
    run_dir = folder / "evaluate"
    config = {"kind": "catbabi", "modes": MODES}
    inputs = {"model": trained, ROLE: data}
    run_stage(request(run_dir, "evaluate", f"babi-{kind}-s7/free/catbabi", config, inputs), stage.run)
    return run_dir


def test_accuracy_equals_a_count_over_the_words_of_the_data_set(tmp_path: Path, babi: Path) -> None:
    (record,) = records(evaluate(tmp_path, "explicit", babi))
    words = json.loads((work_of(babi) / "vocabulary.json").read_text())
    dataset = open_dataset(work_of(babi))
    rows = dataset.fetch(np.arange(len(dataset)))
    model = AutoModelForCausalLM.from_pretrained(next((tmp_path / "train").rglob("model")), local_files_only=True)
    asked: dict[str, list[bool]] = {}
    for inputs, labels, tasks in zip(rows["input_ids"], rows["labels"], rows["task"], strict=True):
        with torch.no_grad():
            answers = model.eval()(input_ids=torch.as_tensor(inputs)[None]).logits[0].argmax(-1)
        for position, (word, label) in enumerate(zip(inputs, labels, strict=True)):
            if words[word] == "?" and label != -100:
                asked.setdefault(str(tasks[position]), []).append(int(answers[position]) == label)
    assert sorted(asked) == ["1", "8"]
    assert record["num_questions_by_task"] == {task: len(right) for task, right in asked.items()}
    assert record["accuracy_by_task"] == {task: np.mean(right) for task, right in asked.items()}
    assert record["accuracy"] == np.mean([right for answers in asked.values() for right in answers])


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
