"""Published numbers: the file itself, and how the report shows them beside ours."""

import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest

from implicit_llm_report.inputs.published import MARK_WORDS, load_published
from implicit_llm_report.inputs.suites import load_suites
from implicit_llm_report.inputs.training_runs import Solver
from implicit_llm_report.sections import published_files, published_rows
from tests.unit.report.sample_runs import given_of

FREE = Solver("fixed_point", 24, 4)
PUBLISHED = load_published()


def rows(records: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The table of published numbers beside these of ours, by their ids."""
    given = replace(given_of(records, experiment="paper"), published=PUBLISHED)
    text = published_files(published_rows(given))["csv"]
    return {row["id"]: row for row in csv.DictReader(io.StringIO(text))}


def test_every_entry_has_a_source_a_mark_that_is_explained_and_a_number_or_words() -> None:
    assert set(PUBLISHED.marks) == set(MARK_WORDS)
    assert len({entry.id for entry in PUBLISHED.entries}) == len(PUBLISHED.entries)
    for entry in PUBLISHED.entries:
        is_number = isinstance(entry.value, float | int) and math.isfinite(entry.value) and entry.value > 0
        assert is_number or isinstance(entry.value, str) or entry.mark == "not_known", entry.id


def test_averages_of_published_downstream_results_are_those_of_their_tasks() -> None:
    suite = next(suite for suite in load_suites() if suite.name == "paper")
    rows_of_tables = {tuple(entry.values.items()): entry for entry in PUBLISHED.downstream}.values()
    assert len(rows_of_tables) == 20
    for entry in rows_of_tables:
        averages = [average for average in suite.averages if average.label in entry.values]
        assert averages, entry.id
        for average in averages:
            found = [entry.values[column] for column in average.columns]
            assert sum(found) / len(found) == pytest.approx(entry.values[average.label], abs=6e-4), entry.id


def test_every_entry_stands_in_the_table_with_source_and_mark() -> None:
    found = rows({})
    wanted = {entry.id for entry in PUBLISHED.entries}
    assert set(found) == wanted
    assert all(row["source"] and row["mark"] for row in found.values())
    assert all((row["published"] == "") == (row["mark"] == "not_known") for row in found.values())
    assert {row["ours_mean"] for row in found.values()} == {""}


def test_ours_stands_beside_the_published_number_of_the_same_thing() -> None:
    word = {
        "run": "a5m",
        "is_implicit": True,
        "group": "A5",
        "monoid": "aperiodic",
        "num_layers": 1,
        "length": 1024,
        "hard_fraction": 0.1,
        "train_length": 256,
        "train_hard_fraction": 0.1,
        "mode": "released-criterion",
        "data": "x",
    }
    words = [word | {"role": "r", "seed": seed, "accuracy_last10": 0.6 + seed / 10} for seed in (0, 1)]
    about = {
        "run": "m",
        "seed": 0,
        "phase": "free",
        "solver": FREE,
        "is_implicit": True,
        "mode": "blockwise",
        "model_type": "implicit_mamba2",
        "num_parameters": 790_000_000,
        "train_tokens": 207e9,
        "role": "r",
    }
    ppl = about | {"data": "pile-test", "length": 2048, "perplexity": 8.4}
    records = {
        "word_problem": words,
        "perplexity": [ppl],
        "duality": [
            about | {"measure": "pair", "data": "t", "length": 2048, "mode": "simultaneous", "token_agreement": 0.97,
                     "eval_mode": "simultaneous", "against": "sequential", "num_parameters": 1_361_000_000}
        ],
        "lm_eval": [about | {"task": "piqa", "metrics": {"acc": 0.73}, "data": "piqa", "sweep": None, "source": None}],
    }  # fmt: skip
    found = rows(records)
    assert float(found["reference-a5m-1024-published"]["ours_mean"]) == pytest.approx(0.65)
    assert found["reference-a5m-1024-published"]["num_seeds"] == "2"
    assert found["d-pile-mamba2-760m-24-4"]["ours_mean"] == "8.4"
    assert found["downstream-d-pile-mamba2-760m-24-4-piqa"]["ours_mean"] == "0.73"
    assert found["duality-mamba2-1.3b"]["ours_mean"] == "0.97"
    assert found["d-pile-mamba2-1.3b-24-4"]["ours_mean"] == ""
