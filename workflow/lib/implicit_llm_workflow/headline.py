"""The main numbers of an experiment, from the manifests of its evaluations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from implicit_llm_workflow.graph import Node, nodes_of_test_data
from implicit_llm_workflow.plan import Plan

MISSING = "-"


def headline_tables(plan: Plan) -> Iterator[Table]:
    """One table for each data set: last-ten accuracy by run and mode (rows) and test set (columns)."""
    for data in plan.experiment.data.values():
        tests = [node.name for node in nodes_of_test_data(data)]
        table = Table(
            title=f"{data.group}: accuracy on the last ten tokens", title_justify="left", box=None, pad_edge=False
        )
        table.add_column("run")
        table.add_column("mode")
        for test in tests:
            table.add_column(test.removeprefix(f"{data.name}-test-"), justify="right")
        for node in _evaluations(plan, data.name):
            for mode, values in _by_mode(_accuracies(plan, node), tests).items():
                mark = " (stale)" if plan.statuses[node.key].state == "stale" else ""
                run = node.name.partition("/")[0]
                table.add_row(f"{run}{mark}", mode, *[_percent(values.get(test)) for test in tests])
        if table.row_count:
            yield table


def where_to_look(plan: Plan) -> Iterator[str]:
    """The report's path and the command that opens MLflow."""
    page = plan.root / "report" / "index.html"
    yield f"report: {page}" if page.is_file() else f"report: not made yet; run snakemake {page}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    store = plan.root.parent / "mlflow.db"
    yield f"MLflow: {uri}" if uri else f"MLflow: mlflow ui --backend-store-uri sqlite:///{store}"


def _evaluations(plan: Plan, data_name: str) -> Iterator[Node]:
    runs = {
        f"{run.name}-s{seed}" for run in plan.experiment.runs.values() if run.data == data_name for seed in run.seeds
    }
    for node in plan.nodes.values():
        if node.stage == "evaluate" and node.name.partition("/")[0] in runs:
            yield node


def _accuracies(plan: Plan, node: Node) -> Mapping[str, Mapping[str, Any]]:
    """Test set -> mode -> accuracy; empty when the evaluation has not been done."""
    recorded = plan.statuses[node.key].recorded
    return recorded.summary.get("accuracy_last10", {}) if recorded else {}


def _by_mode(accuracies: Mapping[str, Mapping[str, Any]], tests: list[str]) -> dict[str, dict[str, float | None]]:
    """Mode -> test set -> accuracy; one row of missing numbers when there are none."""
    rows: dict[str, dict[str, float | None]] = {}
    for test in tests:
        for mode, value in accuracies.get(test, {}).items():
            rows.setdefault(mode, {})[test] = value
    return rows or {MISSING: {}}


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"
