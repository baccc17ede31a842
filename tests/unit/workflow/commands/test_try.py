"""The first command of a newcomer: it measures with the trained model of the package."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import implicit_llm
from implicit_llm_workflow.commands import try_it
from tests.pages import ROOT
from tests.unit.workflow.experiments import output


def test_it_prints_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "try", "--length", "96", "--words", "2")
    assert "2 of 2 sequences are right at every token" in out
    rows = {line[:22].strip(): line.split()[-6:] for line in out.splitlines()}
    assert rows["implicit, 1 layer, now"] == ["100"] * 6  # at 4, 8, 16, 32, 64 and 96 tokens
    assert rows["explicit, layers: 16"] == ["100", "100", "100", "100", "1", "1"]
    assert max(map(len, out.splitlines())) <= try_it.WIDTH


def test_the_kept_numbers_are_those_of_the_table_of_results() -> None:
    results = ROOT / "results/reference/state-tracking/accuracy.csv"
    table = pd.read_csv(results).set_index(["run", "mode", "length", "seed"])
    kept = json.loads((implicit_llm.trained_model(try_it.MODEL) / try_it.KEPT).read_text(encoding="utf-8"))
    assert [of_run["num_layers"] for of_run in kept] == [1, 1, 4, 16]
    for of_run in kept:
        for seed, accuracy in zip(of_run["seeds"], of_run["accuracy_per_position"], strict=True):
            row = table.loc[(of_run["run"], of_run["mode"], len(accuracy), seed)]
            assert np.mean(accuracy[-10:]) == pytest.approx(row.accuracy_last10, abs=1e-4)
            assert of_run["num_parameters"] == row.num_parameters


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("examples/train_word_problem.py", "python examples/train_word_problem.py"),
        ("Snakefile", "implicit-llm run demo"),
        ("notes.txt", "implicit-llm init my-study"),
    ],
)
def test_the_next_command_works_in_the_folder_where_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, command: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    assert try_it.next_command() == command
