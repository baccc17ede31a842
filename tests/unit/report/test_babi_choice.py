"""A grid of CatbAbI runs on which validation and test set disagree, as table and figure show it."""

from __future__ import annotations

import csv
import io

import pytest

from implicit_llm_report.babi import BabiResults, accuracy_by_babi_task, babi_files, babi_tables
from implicit_llm_report.frame import frame_of
from implicit_llm_report.published import load_published
from tests.unit.report.sample_runs import Record

PUBLISHED = load_published()
VALID_AND_TEST = {"i-lucky": (0.4, 0.8), "i-chosen": (0.6, 0.3), "e": (0.2, 0.5)}


def record_of(run: str, split: str, accuracy: float, mode: str) -> Record:
    record = {
        "role": f"evaluate:{run}",
        "run": run,
        "phase": "p",
        "seed": 0,
        "is_implicit": run != "e",
        "data": f"babi-{split}",
        "mode": mode,
    }
    record |= {"data_set": "babi", "split": split}
    record |= {"model_type": "implicit_mamba2", "num_layers": 1, "num_parameters": 100, "train_tokens": 5.0}
    record |= {"accuracy": accuracy, "accuracy_by_task": {"1": accuracy}, "num_questions_by_task": {"1": 10}}
    return record


@pytest.fixture
def grid() -> BabiResults:
    records = [
        record_of(run, split, accuracy, mode)
        for run, accuracies in VALID_AND_TEST.items()
        for split, accuracy in zip(("valid", "test"), accuracies, strict=True)
        for mode in (("parallel",) if run == "e" else ("blockwise", "published"))
    ]
    return BabiResults(frame_of({"catbabi": records}, {}))


def test_table_shows_the_test_set_and_marks_the_run_that_validation_chose(grid: BabiResults) -> None:
    (table,) = babi_tables(grid)
    assert table.data == "babi-test"
    chosen = "i-chosen (chosen on validation)"
    assert table.names == (chosen, chosen, "i-lucky", "i-lucky", "e")
    assert [spread.mean for spread in table.rows[0].spreads] == [0.3, 0.3, 0.8, 0.8, 0.5]
    assert [row.name for row in table.rows if row.is_validation] == ["all questions of the validation set"]
    assert [spread.mean for spread in table.rows[-1].spreads] == [0.6, 0.6, 0.4, 0.4, 0.2]


def test_csv_tells_validation_from_test_and_the_chosen_run_from_the_others(grid: BabiResults) -> None:
    rows = list(csv.DictReader(io.StringIO(babi_files(babi_tables(grid), PUBLISHED)["csv"])))
    measured = [row for row in rows if row["data"]]
    assert {row["split"] for row in measured if row["data"] == "babi-test"} == {"test"}
    assert {row["split"] for row in measured if row["data"] == "babi-valid"} == {"validation"}
    assert {row["run"] for row in measured if row["is_chosen"] == "1"} == {"i-chosen"}


def test_figure_draws_the_chosen_run_of_a_grid_on_the_test_set_only(grid: BabiResults) -> None:
    figure = accuracy_by_babi_task(grid)
    assert figure is not None
    assert [panel.title for panel in figure.panels] == ["CatbAbI, babi-test"]
    assert [series.label for series in figure.legend] == ["i-chosen (chosen on validation)", "e"]


def test_run_without_rivals_carries_no_mark(grid: BabiResults) -> None:
    alone = BabiResults(grid.rows[grid.rows["run"] != "i-lucky"])
    (table,) = babi_tables(alone)
    assert set(table.names) == {"i-chosen", "e"}
    assert not any(table.chosen)
