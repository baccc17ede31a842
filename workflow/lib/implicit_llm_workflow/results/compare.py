"""Numbers of finished results: the main ones of an experiment, and any results side by side.

Of results side by side it also shows in what their settings, code and inputs differ.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.hints import natural, nearest
from implicit_llm_contracts.runs import (
    FINGERPRINT_DIGITS,
    MANIFEST,
    Manifest,
    UserError,
    canonical_json,
    without_password,
)
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan, UnknownTarget
from implicit_llm_workflow.results.job_states import MODEL_STAGES, run_and_phase
from implicit_llm_workflow.results.lineage import Lineage, Result, trace
from implicit_llm_workflow.text import MISSING, number_text, plain_table, spread_text

CODE_DIGITS = 12
AT_END = "at the end (means over the last 50 steps)"
SWEPT = "@"  # in the mode of a number that a sweep gave
_DATA = "data"  # of a summary: settings, not numbers


class NotComparable(UserError):
    """A name means several runs, or one that has not finished."""


@dataclass(frozen=True)
class Column:
    """A result, or the results of all seeds of a run."""

    label: str
    results: tuple[Lineage, ...]


@dataclass(frozen=True)
class DifferentSetting:
    """`where`: in the result itself (""), or in which inputs by role, such as "start.data"; `values`: a text for each
    column, those of several seeds together.
    """

    setting: str
    where: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def shown(self) -> str:
        """ "phase.solver.tol", or "data: group"; a difference that inputs share has one row."""
        first, *others = self.where
        name = f"{first}: {self.setting}" if first else self.setting
        return f"{name} (and of {', '.join(others)})" if others else name


@dataclass(frozen=True)
class NumberRow:
    """`values`: for each column the numbers of its results that have one."""

    section: str
    name: str
    values: tuple[tuple[float, ...], ...]


def find_columns(names: Sequence[str], plan: Plan | None) -> list[Column]:
    """A column for each name; without a plan each must be a folder. Raises: UserError."""
    found = [_find(name, plan) for name in names]
    labels = [label for label, _ in found]
    return [
        Column(results[0].top.run_dir.as_posix() if labels.count(label) > 1 else label, tuple(results))
        for label, results in found
    ]


def is_folder(name: str) -> bool:
    """Whether it names a run directory, or something in it, rather than a run of the experiment."""
    return ("/" in name or name in (".", "..")) and Path(name).exists()


def _find(name: str, plan: Plan | None) -> tuple[str, list[Lineage]]:
    if plan is None or is_folder(name):
        result = trace(Path(name))
        return result.top.manifest.name, [result]
    label, keys = find_model(name, plan)
    finished = [key for key in keys if (plan.root / key / MANIFEST).exists()]
    if not finished:
        raise NotComparable(f"{name}: has not finished; type: {plan.command_for([plan.nodes[keys[0]]])}")
    if len(finished) < len(keys):
        label = f"{label} ({len(finished)} of {len(keys)} seeds)"
    return label, [trace(plan.root / key) for key in finished]


def find_model(name: str, plan: Plan) -> tuple[str, list[str]]:
    """What a name means: its full form, and the keys of its jobs, several only if they differ in nothing but the seed.

    A name is a job, a run with its phase, a run (what came out of it), or one of these without the seed (all seeds).
    Raises: UnknownTarget; NotComparable if the experiment has several such runs.
    """
    models = [node for node in plan.nodes.values() if node.stage in MODEL_STAGES]
    nodes = [node for node in models if name.strip("/") in _names(node)]
    if not nodes:
        hint = nearest(name, {run_and_phase(node.key)[0] for node in models})
        raise UnknownTarget(f"{name}: experiment {plan.experiment.name} has no such run; {hint}")
    if len({node.seedless_key for node in nodes}) > 1:  # no phase was named: what the training ended with
        ends = {node.key: (node.config.get("phase") or {}).get("end_step") for node in nodes}
        nodes = [node for node in nodes if ends[node.key] == node.config.get("total_steps")]
    labels = dict.fromkeys("/".join(run_and_phase(node.seedless_key if len(nodes) > 1 else node.key)) for node in nodes)
    if len(labels) != 1:
        raise NotComparable(f"{name}: means several runs; name one of {', '.join(labels)}")
    return next(iter(labels)), [node.key for node in nodes]


def _names(node: Node) -> Iterator[str]:
    for key in (node.key, node.seedless_key):
        run, phase = run_and_phase(key)
        yield from (key, run, f"{run}/{phase}")


def differences(columns: Sequence[Column]) -> list[DifferentSetting]:
    """What differs, and nothing that is equal; inputs only as far as they differ themselves."""
    members = [result for column in columns for result in column.results]
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    seen: set[tuple[str, ...]] = set()

    def add(where: str, setting: str, texts: Sequence[str]) -> None:
        """A row, if the texts, one for each member, are not all equal."""
        rest = iter(texts)
        values = tuple(", ".join(dict.fromkeys(next(rest) for _ in column.results)) for column in columns)
        if len(set(texts)) > 1 and not (setting == "seed" and len(set(values)) == 1):
            found.setdefault((setting, values), []).append(where)

    def walk(where: str, results: Sequence[Result]) -> None:
        """From the results to their inputs, those of all members at once."""
        fingerprints = tuple(result.fingerprint for result in results)
        if len(set(fingerprints)) == 1 or fingerprints in seen:
            return
        seen.add(fingerprints)
        tables = [_settings(result.manifest) for result in results]
        for setting in dict.fromkeys(name for table in tables for name in table):
            if not any(name.startswith(f"{setting}.") for table in tables for name in table):  # null, of a solver
                add(where, setting, [table.get(setting, MISSING) for table in tables])
        for role in dict.fromkeys(role for result in results for role in result.manifest.upstream):
            wanted = [result.manifest.upstream.get(role) for result in results]
            inputs = [member.runs.get(item or "") for member, item in zip(members, wanted, strict=True)]
            if None in inputs:
                add(where, f"input {role}", [*map(_input_text, inputs, wanted)])
            else:
                walk(f"{where}.{role}" if where else role, [item for item in inputs if item is not None])

    walk("", [member.top for member in members])
    return [DifferentSetting(setting, tuple(where), values) for (setting, values), where in found.items()]


def _input_text(found: Result | None, fingerprint: str | None) -> str:
    if found is not None:
        return found.key
    return MISSING if fingerprint is None else f"not found ({fingerprint[:FINGERPRINT_DIGITS]})"


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values below a mapping, by their keys."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _settings(manifest: Manifest) -> dict[str, str]:
    """Stage, config and code as texts by dotted key."""
    config = sorted((".".join(path), value) for path, value in _leaves(manifest.config))
    texts = {key: value if isinstance(value, str) else canonical_json(value) for key, value in config}
    return {"stage": manifest.stage, **texts, "code": manifest.code[:CODE_DIGITS]}


def number_rows(columns: Sequence[Column]) -> list[NumberRow]:
    """All numbers that any of the results has, section by section."""
    tables = [[dict(_numbers(result)) for result in column.results] for column in columns]
    names = dict.fromkeys(name for column in tables for numbers in column for name in numbers)
    sections = list(dict.fromkeys(section for section, _ in names))
    return [
        NumberRow(*item, tuple(tuple(found[item] for found in column if item in found) for column in tables))
        for item in sorted(names, key=lambda item: (sections.index(item[0]), natural(item[1])))  # L8 before L16
    ]


def _numbers(result: Lineage) -> Iterator[tuple[tuple[str, str], float]]:
    """Section, name and value."""
    summaries = [(AT_END, {key: item for key, item in result.top.manifest.summary.items() if key != _DATA})]
    summaries += [(f"evaluation {name}", recorded.summary) for name, recorded in _evaluations(result.top)]
    for section, summary in summaries:
        for path, value in _leaves(summary):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield (section, " ".join(path).removeprefix("metrics ")), float(value)


def _evaluations(model: Result) -> Iterator[tuple[str, Manifest]]:
    """Finished evaluations of this very result, by name."""
    folder = model.root / "evaluate" / "/".join(run_and_phase(model.key))
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        recorded = Manifest.find(path)
        if recorded is not None and recorded.upstream.get("model") == model.fingerprint:
            yield path.parent.name, recorded


def view(columns: Sequence[Column]) -> Iterator[RenderableType]:
    """Tables one after the other; of several seeds the mean, the lowest and the highest."""
    sizes = [len(column.results) for column in columns]
    labels = [it.label if size == 1 else f"{it.label} ({size} seeds)" for it, size in zip(columns, sizes, strict=True)]
    if rows := differences(columns):
        yield _table("what differs", labels, [(row.shown, *row.values) for row in rows])
    else:
        yield Text("nothing differs: config, code and inputs are equal")
    numbers = number_rows(columns)
    shown = [row for row in numbers if SWEPT not in row.name]
    for section, group in groupby(shown, lambda row: row.section):
        cells = [(row.name, *(spread_text(values, number_text) for values in row.values)) for row in group]
        yield Text()
        yield _table(section, labels, cells, is_right=True)
    if swept := len(numbers) - len(shown):
        yield Text(f"\n{swept} numbers of sweeps are in --json", style="dim")


def _table(title: str, labels: list[str], rows: Iterable[tuple[str, ...]], *, is_right: bool = False) -> Table:
    table = plain_table(title, *map(escape, labels), right=[*map(escape, labels)] if is_right else ())
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def as_json(columns: Sequence[Column]) -> dict[str, Any]:
    """The results of each column, what differs, and all numbers of all seeds."""
    return {
        "columns": {column.label: [result.top.run_dir for result in column.results] for column in columns},
        "differences": [asdict(row) for row in differences(columns)],
        "numbers": [asdict(row) for row in number_rows(columns)],
    }


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
            for mode, part, value in _by_part(plan, node, metric):
                row = rows.setdefault((_run_text(plan, node), mode), {})
                row.setdefault(part, []).extend([] if value is None else [value])
    for (data, evaluation, metric), rows in tables.items():
        yield _number_table(f"{data}, {evaluation}: {metric}", data, rows, is_share=metric.startswith("accuracy"))


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


def _run_text(plan: Plan, node: Node) -> str:
    """The run and its phase, marked if the result is stale."""
    name = node.seedless_key.removeprefix("evaluate/").rpartition("/")[0]
    return f"{name} (stale)" if plan.statuses[node.key].state == "stale" else name


def _by_part(plan: Plan, node: Node, metric: str) -> Iterator[tuple[str, str, float | None]]:
    """Mode, test set and value of a finished evaluation; one missing number of an unfinished one."""
    recorded = plan.statuses[node.key].recorded
    by_part: Mapping[str, Mapping[str, float | None]] = (recorded.summary.get(metric) if recorded else None) or {}
    found = [(mode, part, value) for part, by_mode in by_part.items() for mode, value in by_mode.items()]
    yield from found or [(MISSING, "", None)]


def _number_table(title: str, data: str, rows: Rows, *, is_share: bool) -> Table:
    parts = sorted({part for row in rows.values() for part in row if part}, key=natural)
    shown = [escape(re.sub(r"^test[-.]", "", part.removeprefix(f"{data}-"))) for part in parts or [MISSING]]
    table = plain_table("run", "mode", *shown, right=shown, title=title, title_justify="left", min_width=len(title))
    for (name, mode), row in rows.items():
        cells = [spread_text(row.get(part, []), _percent if is_share else number_text) for part in parts or [MISSING]]
        table.add_row(escape(name), mode, *cells)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
