"""The main numbers of an experiment, from the results of its evaluations."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from implicit_llm_contracts.config.evaluation_kinds import PERPLEXITY
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_workflow.experiment_files.data_sets import Catbabi, DataSet, LanguageModel, WordProblem
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.runs import Run
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.recorded import read_metrics
from implicit_llm_workflow.results.shown_numbers import MISSING

_STALE = " (stale)"


@dataclass(frozen=True)
class Evaluated:
    """One phase of a run on one data set, and the jobs that evaluate it, one for every seed."""

    run: Run
    phase: str
    seeds: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The run's name; of a run with branches also the phase."""
        return f"{self.run.name}/{self.phase}" if len(self.run.final_phases) > 1 else self.run.name


def headline_tables(plan: Plan) -> Iterator[Table]:
    """One table for each data set and evaluation; data sets that nothing is evaluated on have none."""
    for data in plan.experiment.data.values():
        for evaluation in plan.experiment.evaluations.values():
            rows = list(_evaluated(plan, data, evaluation))
            if not rows or evaluation.sweep:
                continue
            if isinstance(data, WordProblem) and evaluation.kind == WORD_PROBLEM:
                yield _word_problem_table(plan, data, rows)
            elif isinstance(data, Catbabi) and evaluation.kind == CATBABI:
                yield _catbabi_table(plan, data, rows)
            elif isinstance(data, LanguageModel) and evaluation.kind == PERPLEXITY:
                yield _perplexity_table(plan, data, rows)


def where_to_look(plan: Plan) -> Iterator[str]:
    """The report's path, or the command that makes it; and the one that opens MLflow."""
    page = plan.root / "report" / "index.html"
    make = plan.command_for([plan.nodes["report"]])
    yield f"report: {page}" if page.is_file() else f"report: not made yet; type: {make}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    store = plan.root.parent / "mlflow.db"
    yield f"MLflow: {without_password(uri)}" if uri else f"MLflow: mlflow ui --backend-store-uri sqlite:///{store}"


def _evaluated(plan: Plan, data: DataSet, evaluation: Evaluation) -> Iterator[Evaluated]:
    for run in plan.experiment.runs.values():
        if run.data == data.name and evaluation in plan.experiment.evaluations_of(run):
            for phase in run.final_phases:
                keys = tuple(f"evaluate/{run.name}-s{seed}/{phase.name}/{evaluation.name}" for seed in run.seeds)
                yield Evaluated(run, phase.name, run.seeds, keys)


def _word_problem_table(plan: Plan, data: WordProblem, rows: Sequence[Evaluated]) -> Table:
    """Last-ten accuracy by run, seed and mode (rows) and test set (columns)."""
    tests = [node.name for node in data.test_nodes()]
    table = _table(f"{data.group}: accuracy on the last ten tokens", "run", "mode")
    for test in tests:
        table.add_column(test.removeprefix(f"{data.name}-test-"), justify="right")
    for row in rows:
        for seed, key in zip(row.seeds, row.keys, strict=True):
            recorded = plan.statuses[key].recorded
            accuracies = recorded.summary.get("accuracy_last10", {}) if recorded else {}
            name = row.shown.replace(row.run.name, f"{row.run.name}-s{seed}", 1)
            for mode, values in _by_mode(accuracies, tests).items():
                table.add_row(f"{name}{_mark(plan, [key])}", mode, *[_percent(values.get(test)) for test in tests])
    return table


def _perplexity_table(plan: Plan, data: LanguageModel, rows: Sequence[Evaluated]) -> Table:
    """Mean and spread over seeds by run, phase and mode (rows) and length (columns)."""
    table = _table(f"{data.name}: perplexity on the test split", "run", "phase", "mode", "seeds")
    for length in data.test.lengths:
        table.add_column(f"L{length}", justify="right")
    for row in rows:
        by_mode = _values(plan, row, "length", "perplexity")
        for mode, by_length in by_mode.items():
            num_seeds = max((len(values) for values in by_length.values()), default=0)
            cells = [_mean_and_spread(by_length.get(length, []), "{:.2f}") for length in data.test.lengths]
            table.add_row(f"{row.run.name}{_mark(plan, row.keys)}", row.phase, mode, str(num_seeds), *cells)
    return table


def _catbabi_table(plan: Plan, data: Catbabi, rows: Sequence[Evaluated]) -> Table:
    """Mean and spread over seeds of the accuracy over all questions, by run and mode (rows) and set (columns)."""
    table = _table(f"{data.name}: accuracy over all questions", "run", "mode", "seeds")
    tests = [node.name for node in data.test_nodes()]
    for test in tests:
        table.add_column(test.removeprefix(f"{data.name}-"), justify="right")
    for row in rows:
        for mode, by_set in _values(plan, row, "data", "accuracy").items():
            num_seeds = max((len(values) for values in by_set.values()), default=0)
            cells = [_mean_and_spread([100 * value for value in by_set.get(test, [])], "{:.1f} %") for test in tests]
            table.add_row(f"{row.shown}{_mark(plan, row.keys)}", mode, str(num_seeds), *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, min_width=len(title))
    for column in columns:
        table.add_column(column)
    return table


def _values(plan: Plan, row: Evaluated, by: str, metric: str) -> dict[str, dict[Any, list[float]]]:
    """Mode -> value of the field `by` -> the metric, one number for every seed that has it."""
    found: dict[str, dict[Any, list[float]]] = {}
    for key in row.keys:
        recorded = plan.statuses[key].recorded
        for record in read_metrics(plan.run_dir(plan.nodes[key]), recorded) if recorded else []:
            values = found.setdefault(str(record.get("mode", MISSING)), {}).setdefault(record.get(by), [])
            if isinstance(record.get(metric), int | float):
                values.append(float(record[metric]))
    return found or {MISSING: {}}


def _mark(plan: Plan, keys: Sequence[str]) -> str:
    return _STALE if any(plan.statuses[key].state == "stale" for key in keys) else ""


def _by_mode(accuracies: Mapping[str, Mapping[str, Any]], tests: list[str]) -> dict[str, dict[str, float | None]]:
    """Mode -> test set -> accuracy; one row of missing numbers when there are none."""
    rows: dict[str, dict[str, float | None]] = {}
    for test in tests:
        for mode, value in accuracies.get(test, {}).items():
            rows.setdefault(mode, {})[test] = value
    return rows or {MISSING: {}}


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def _mean_and_spread(values: Sequence[float], form: str) -> str:
    """The mean, of several values also the lowest and the highest."""
    if not values:
        return MISSING
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"
