"""Downstream tasks in the report, from made-up runs: the paper's columns, averages, what is missing, the figure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_report.inputs.suites import load_suites
from tests.unit.report.sample_language_runs import LanguageRun, family, make_language_runs
from tests.unit.report.sample_runs import Record, evaluated, figure_of, make_report, page_of, rows_of
from tests.unit.report.test_report_stage import see_that_the_page_is_whole

RUNS = family("mamba2", "implicit_mamba2", seeds=(0, 1))[:2]
PAPER = next(suite for suite in load_suites() if suite.name == "paper")
TASKS = tuple(dict.fromkeys(column.task for column in PAPER.columns))


def records_of(run: LanguageRun, phase: str, seed: int, tasks: tuple[str, ...] = TASKS) -> list[Record]:
    """A record for each task and mode; accuracies differ by task, seed and kind of model."""
    about: Record = {
        "kind": "lm_eval", "run": run.name, "seed": seed, "phase": phase, "is_implicit": run.is_implicit,
        "model_type": run.model_type, "num_parameters": run.num_parameters, "train_tokens": 1e6, "length": None,
        "num_documents": 64, "num_fewshot": 0, "f_evaluations_per_token": 8.0 if run.is_implicit else 1.0,
        "task_version": 1.0, "task_hash": "f" * 64, "harness_version": "0.4.13", "sweep": None, "source": None,
    }  # fmt: skip
    found = []
    for index, task in enumerate(tasks):
        score = 0.3 + 0.05 * index + 0.02 * seed + 0.1 * run.is_implicit
        metrics = {"acc": score, "acc_norm": score + 0.01} | (
            {"perplexity": 12.5 - seed} if task == "lambada_openai" else {}
        )
        mine = about | {"task": task, "data": task, "metrics": metrics, "stderr": dict.fromkeys(metrics, 0.015)}
        modes = ("blockwise", "sequential") if run.is_implicit else ("parallel",)
        found += [mine | {"mode": mode} for mode in modes]
        for value in (1, 4, 16) if run.is_implicit else ():
            swept = {"base": "blockwise", "key": "eval_max_iter", "value": value}
            few = {metric: number - 0.1 / value for metric, number in metrics.items()}
            found.append(mine | {"mode": f"blockwise@eval_max_iter={value}", "sweep": swept, "metrics": few})
    return found


def report_of(folder: Path, change: Any = dict, figures: Any = ()) -> Path:
    """Its tables; `change` edits a record, or leaves it out."""
    results = folder / "results"
    roles = make_language_runs(results, [replace(run, steps=100) for run in RUNS])
    for run in RUNS:
        phase = "free-80" if run.is_implicit else "explicit"
        for seed in run.seeds:
            records = [changed for record in records_of(run, phase, seed) if (changed := change(record))]
            roles |= evaluated(results, f"{run.name}-s{seed}/{phase}/downstream", "lm_eval", records)
    return make_report(folder, roles, experiment="demo", figures=figures, tables=("downstream", "published"))


def by_column(made: Path, model: str, mode: str) -> dict[str, dict[str, str]]:
    mine = (row for row in rows_of(made, "downstream") if (row["model"], row["mode"]) == (model, mode))
    parts = ("mean", "low", "high")
    return {r["column"]: r | {f"value_{part}": r[f"{r['metric']}_{part}"] for part in parts} for r in mine}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("downstream"), figures=("test-time-iterations",))


def test_the_table_has_the_papers_columns_and_averages_for_each_model_and_mode(made: Path) -> None:
    rows = rows_of(made, "downstream")
    labels = [column.label for column in PAPER.columns] + [average.label for average in PAPER.averages]
    explicit = by_column(made, "explicit", "parallel")
    assert [label for label in labels if label in explicit] == labels == list(explicit)
    assert {(row["model"], row["mode"]) for row in rows} == {
        ("explicit", "parallel"),
        ("implicit", "blockwise"),
        ("implicit", "sequential"),
    }
    assert {row["metric"] for row in rows if row["column"] == "HellaSwag"} == {"acc_norm"}
    assert {row["metric"] for row in rows if row["column"] == "PIQA"} == {"acc"}
    assert {row["task_hash"] for row in rows if row["task"]} == {"f" * 64}
    assert not any("@" in row["mode"] for row in rows)
    see_that_the_page_is_whole(made)
    assert "LAMBADA ppl" in page_of(made)
    assert r"\toprule" in (made / "tables" / "downstream.tex").read_text()


def test_averages_are_taken_seed_by_seed_over_accuracies_only(made: Path) -> None:
    row = by_column(made, "explicit", "parallel")
    tasks = [row[label] for label in PAPER.averages[0].columns]
    assert float(row["average"]["value_mean"]) == pytest.approx(sum(float(task["value_mean"]) for task in tasks) / 7)
    assert float(row["average"]["value_high"]) - float(row["average"]["value_low"]) == pytest.approx(0.02)
    assert (row["average"]["num_seeds"], row["average"]["published"]) == ("2", "")


def test_a_missing_number_is_missing_in_its_average_too_and_never_zero(tmp_path: Path) -> None:
    def without(record: Record) -> Record | None:
        if record["task"] == "piqa" and record["seed"] == 0 and not record["is_implicit"]:
            return record | {"metrics": {"acc": None, "acc_norm": None}}
        if record["mode"] == "sequential":
            record["num_documents"] = 16
        return None if record["task"] == "openbookqa" else record

    made = report_of(tmp_path, without)
    row = by_column(made, "explicit", "parallel")
    assert (row["PIQA"]["num_seeds"], row["PIQA"]["num_missing"]) == ("1", "1")
    assert "OpenbookQA" not in row
    assert (row["average"]["value_mean"], row["average"]["num_missing"]) == ("", "2")
    assert (row["average without OBQA"]["num_seeds"], row["average without OBQA"]["num_missing"]) == ("1", "1")
    page = page_of(made)
    assert "1 missing" in page
    assert "sequential, 2 seeds, 226,000 parameters, 16 documents" in page
    assert "missing" in (made / "tables" / "downstream.tex").read_text()


def test_a_released_model_stands_by_its_own_name_beside_its_published_numbers(tmp_path: Path) -> None:
    def released(record: Record) -> Record:
        about = {"source": {"hub": "state-spaces/mamba2-1.3b"}, "train_tokens": None}
        return record | about if not record["is_implicit"] else record

    assert by_column(report_of(tmp_path, released), "explicit", "parallel")["WinoGrande"]["published"] == "0.6117"


def test_the_figure_has_the_average_against_iterations_with_explicit_models_beside(made: Path) -> None:
    figure = figure_of(made, "test-time-iterations")
    assert "average accuracy" in figure
    assert "iterations allowed for a block" in figure
    assert RUNS[1].name in figure


def test_a_task_that_no_suite_has_gets_columns_of_its_own(tmp_path: Path) -> None:
    def own(record: Record) -> Record:
        about = {"task": "mine", "data": "mine", "metrics": {"acc": 0.5, "f1": 0.4}}
        return record | about if record["task"] == "piqa" else record

    found = by_column(report_of(tmp_path, own), "explicit", "parallel")
    assert (found["mine acc"]["suite"], found["mine f1"]["value_mean"]) == ("Other tasks", "0.4")
    assert "PIQA" not in found
