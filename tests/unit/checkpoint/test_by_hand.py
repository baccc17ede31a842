"""Evaluating by hand, through the console and the real stages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.foreign import VOCAB, save_foreign
from tests.unit.evaluation.finished_runs import train_nothing, word_problems
from tests.unit.workflow.console_calls import run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_problems(tmp_path_factory.mktemp("data") / "s3-test-L12-h0.5")


def records_in(out: str) -> list[dict[str, Any]]:
    return json.loads(Path(out.splitlines()[-1]).read_text())["records"]


@pytest.mark.parametrize("kind", ["gpt_neox", "original"])
def test_any_checkpoint_is_evaluated_and_found_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problems: Path, kind: str
) -> None:
    folder = tmp_path / "models" / kind
    save_foreign(kind, folder)
    words = ("evaluate", "word-problem", "--model", str(folder), "--data", str(problems), "--device", "cpu")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    (record,) = records_in(out)
    assert (record["run"], record["phase"], record["seed"], record["mode"]) == (kind, "checkpoint", None, "parallel")
    assert record["source"]["path"] == str(folder)
    assert len(record["source"]["sha256"]["model.safetensors"]) == 64
    assert re.search(r"s3-test-L12-h0\.5 +parallel +12 ", out)
    code, again, err = run(capsys, *words)
    assert err.count("already done") == 2  # the import and the evaluation
    assert again == out
    save_foreign("llama", folder)  # another model in the same place
    _, other, _ = run(capsys, *words)
    assert other.splitlines()[-1] != out.splitlines()[-1]


def test_a_run_directory_is_evaluated_in_the_modes_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problems: Path
) -> None:
    trained = train_nothing(tmp_path, "implicit", "s3", VOCAB, {})
    words = ["word-problem", "--model", str(trained), "--data", str(problems), "--device", "cpu", "--out", "mine"]
    words += ["--mode", "blockwise", "--mode", "sequential", "--max-iter", "3", "--block-len", "4", "--stop", "token"]
    code, out, err = run(capsys, "evaluate", *words)
    assert code == 0, err
    blockwise, sequential = records_in(out)
    assert (blockwise["run"], blockwise["seed"], blockwise["source"]) == ("s3-implicit", 7, None)
    assert (blockwise["eval_block_len"], blockwise["eval_max_iter"], blockwise["eval_stop"]) == (4, 3, "token")
    assert sequential["eval_mode"] == "sequential"
    assert out.splitlines()[-1].startswith("mine/work/")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("word-problem", "Missing option '--model'; type `implicit-llm evaluate word-problem --help`"),
        ("word-problem --model gone --data DATA", "--model gone: has neither manifest.json nor config.json"),
        ("word-problem --model DATA --data DATA", "which has no model; give that of a training phase"),
        ("word-problem --model gone", "--data: is missing"),
        ("word-problem --model gone --data .", "no manifest there"),
        ("word-problem --model gone --data DATA --data DATA", "given already"),
        ("word-problem --model gone --data DATA --mode blokwise", "did you mean 'blockwise'"),
        ("word-problem --model gone --data DATA --mode sequential --block-len 4", "--block-len: is for"),
        ("word-problem --model gone --data DATA --sweep iter=1", "no setting 'iter' is swept"),
        ("perplexity --model x --data DATA", "is of kind word_problem, and perplexity reads token_stream"),
        ("word-problem --model gone --data DATA --sweep max-iter=a", "--sweep max-iter=a: must be numbers"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str], problems: Path, words: str, named: str
) -> None:
    given = [str(problems) if word == "DATA" else word for word in words.split()]
    code, _, err = run(capsys, "evaluate", *given)
    assert code == 2
    assert named in err.splitlines()[-1]
