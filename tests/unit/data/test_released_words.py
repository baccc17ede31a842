"""Word problems from the files of the authors' generator, and what else such a file may hold."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_data.released_words import ReleasedWordsError, read_words
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate
from implicit_llm_data.stages.word_problem import run as stage
from implicit_llm_jobs.stage import StageRequest, run_stage
from tests.refusals import refused
from tests.unit.workflow.experiments import output, refusal

PARITY = Path(__file__).parents[2] / "data" / "parity"
DRAWN = WordProblemConfig("A5", "aperiodic", 0.1, 12, 20, "train", 3, 8)


def drawn(config: WordProblemConfig = DRAWN) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, all shards together."""
    shards = [generate(config, shard) for shard in range(config.num_shards)]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*shards, strict=True))
    return inputs, targets


def save(path: Path, first: np.ndarray, second: np.ndarray, **changes: Any) -> Path:
    """Write a file as the authors' generator does."""
    words = {"inputs": torch.tensor(first.astype(np.int64)), "targets": torch.tensor(second.astype(np.int64))}
    torch.save({**words, "vocab_size": torch.LongTensor([240])} | changes, path)
    return path


def made(folder: Path, path: Path, **changes: Any) -> Path:
    """The work directory of the data set of 16 sequences from this file."""
    config = {
        "kind": "word_problem", "group": "A5", "monoid": "aperiodic", "hard_fraction": 0.1, "length": 12,
        "num_samples": 16, "split": "train", "seed": 0, "shard_samples": 8, "file": str(path),
        "sha256": sha256_of(path) if path.is_file() else None, **changes,
    }  # fmt: skip
    run_dir = folder / "data" / "words"
    manifest = run_stage(StageRequest(run_dir, Identity("data", "words", config, "c0de", {})), stage)
    return run_dir / "work" / manifest.fingerprint[:16]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_the_first_sequences_of_a_file_become_the_data_set(tmp_path: Path, dtype: torch.dtype) -> None:
    inputs, targets = drawn()
    values = {"inputs": torch.tensor(inputs).to(dtype), "targets": torch.tensor(targets).to(dtype)}
    path = save(tmp_path / "train_A5_L12_P090.bin", inputs, targets, **values)
    dataset = open_dataset(made(tmp_path, path))
    found = dataset.fetch(np.arange(16))
    np.testing.assert_array_equal(found["input_ids"], inputs[:16])
    np.testing.assert_array_equal(found["labels"], targets[:16])
    assert (len(dataset), dataset.vocab_size) == (16, 240)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 13}, "has 20 words of 12 tokens out of 240, and the data set wants 16 of 13"),
        ({"num_samples": 21}, "the data set wants 21 of 12"),
        ({"monoid": "none"}, "out of 60; correct length, num_samples, group or monoid"),
        ({"sha256": "0" * 64}, "has changed since this job was planned"),
    ],
)
def test_a_file_of_other_words_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "words.bin", *drawn())
    with refused(message, ReleasedWordsError):
        made(tmp_path, path, **changes)


def test_targets_that_are_no_products_are_refused(tmp_path: Path) -> None:
    inputs, targets = drawn()
    path = save(tmp_path / "words.bin", inputs, targets[:, ::-1].copy())
    with refused("its targets are no products of its inputs in A5 with monoid aperiodic", ReleasedWordsError):
        made(tmp_path, path)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_code_in_a_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "words.bin", *drawn(), inputs=Harmful())
    with refused("posix.mkdir is no tensor of integers", ReleasedWordsError):
        read_words(path)
    assert not Path("harmed").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive"])
def test_a_damaged_or_missing_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.bin").write_bytes(content)
    with refused("is no file of word problems", ReleasedWordsError):
        read_words(tmp_path / "words.bin")
    with refused("is missing; put it there, or correct `folder`", ReleasedWordsError):
        read_words(tmp_path / "others.bin")


def test_their_checkpoint_is_evaluated_on_their_file_by_one_command_with_and_without_their_criterion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = drawn(replace(DRAWN, monoid="none"))
    save(Path("test_A5_L12_P090.bin"), *words, vocab_size=torch.LongTensor([60]))
    call = ["evaluate", "word-problem", "--model", str(PARITY / "mamba2-implicit"), "--data", "test_A5_L12_P090.bin"]
    call += ["--mode", "blockwise", "--mode", "released-criterion", "--stop", "token", "--block-len", "4"]
    out = output(capsys, *call)
    rows = json.loads(Path(out.splitlines()[-1]).read_text())["records"]
    assert [(row["mode"], row["eval_stop"], row["group"], row["monoid"], row["num_samples"]) for row in rows] == [
        ("blockwise", "token", "A5", "none", 20),
        ("released-criterion", "batch", "A5", "none", 20),
    ]
    save(Path("words.bin"), *words)
    assert "has no name such as test_A5_L256_P050.bin" in refusal(capsys, *call[:5], "words.bin")
