"""The main numbers of an experiment, from the manifests of its evaluations."""

import os
import re
from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.table import Table

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.text import MISSING, number_text, plain_table, spread_text

# Run and phase, and mode -> test set -> the number of each seed.
Rows = dict[tuple[str, str], dict[str, list[float]]]


def number_tables(plan: Plan) -> Iterator[Table]:
    """A table for each data set and evaluation: the first metric of its kind, by run and mode, over the seeds."""
    tables: dict[tuple[str, str, str], Rows] = {}
    for node in plan.nodes.values():
        metric = _metric_of(node)
        if node.run is not None and metric is not None:
            data = plan.experiment.runs[node.run].data
            rows = tables.setdefault((data, node.name.rpartition("/")[2], metric), {})
            for mode, part, value in _numbers(plan, node, metric):
                row = rows.setdefault((_shown(plan, node), mode), {})
                row.setdefault(part, []).extend([] if value is None else [value])
    for (data, evaluation, metric), rows in tables.items():
        yield _table(f"{data}, {evaluation}: {metric}", data, rows, is_share=metric.startswith("accuracy"))


def where_to_look(plan: Plan) -> Iterator[str]:
    """The report's path, or the command that makes it; and the command that opens MLflow."""
    page = plan.root / "report" / "index.html"
    make = plan.command_for([plan.nodes["report"]])
    yield f"report: {page}" if page.is_file() else f"report: not made yet; type: {make}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    store = plan.root.parent / "mlflow.db"
    yield f"MLflow: {without_password(uri)}" if uri else f"MLflow: mlflow ui --backend-store-uri sqlite:///{store}"


def _metric_of(node: Node) -> str | None:
    """None for jobs without a main number: other stages, sweeps, and kinds whose metrics depend on the task."""
    if node.stage != "evaluate" or node.config.get("sweep"):
        return None
    return next(iter(EVALUATION_KINDS[node.config["kind"]].metrics), None)


def _shown(plan: Plan, node: Node) -> str:
    """The run and its phase, marked if the result is stale."""
    name = node.seedless_key.removeprefix("evaluate/").rpartition("/")[0]
    return f"{name} (stale)" if plan.statuses[node.key].state == "stale" else name


def _numbers(plan: Plan, node: Node, metric: str) -> Iterator[tuple[str, str, float | None]]:
    """Mode, test set and value of a finished evaluation; one missing number of an unfinished one."""
    recorded = plan.statuses[node.key].recorded
    by_part: Mapping[str, Mapping[str, float | None]] = (recorded.summary.get(metric) if recorded else None) or {}
    found = [(mode, part, value) for part, by_mode in by_part.items() for mode, value in by_mode.items()]
    yield from found or [(MISSING, "", None)]


def _table(title: str, data: str, rows: Rows, *, is_share: bool) -> Table:
    parts = sorted({part for row in rows.values() for part in row if part}, key=natural)
    shown = [escape(re.sub(r"^test[-.]", "", part.removeprefix(f"{data}-"))) for part in parts or [MISSING]]
    table = plain_table("run", "mode", *shown, right=shown, title=title, title_justify="left", min_width=len(title))
    for (name, mode), row in rows.items():
        cells = [spread_text(row.get(part, []), _percent if is_share else number_text) for part in parts or [MISSING]]
        table.add_row(escape(name), mode, *cells)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
