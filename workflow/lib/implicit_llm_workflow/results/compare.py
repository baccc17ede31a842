"""Show the numbers of finished results: the main numbers of an experiment, or any results side by side.

A comparison side by side also shows the differences in settings, code and inputs.
"""

import os
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import natural, nearest
from implicit_llm_contracts.runs.identity import canonical_json
from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, committed_below, run_directories
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_jobs.tracking.mlflow_store import sqlite_uri
from implicit_llm_workflow.experiment_files.runs import Run
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan, UnknownTarget
from implicit_llm_workflow.results.lineage import Lineage, Result, trace
from implicit_llm_workflow.text import MISSING, number_text, plain_table, spread_text

CODE_DIGITS = 12
AT_END = "at the end (means over the last 50 steps)"
SWEPT = "@"  # part of the name of each mode that a sweep adds
MODEL_STAGES = ("train", "checkpoint")
_DATA = "data"  # the entry of a summary that has settings, not numbers


class NotComparable(UserError):
    """The name matches several runs, or a run that has not finished."""


@dataclass(frozen=True)
class ComparedColumn:
    """A column of a comparison: one result, or the results of all finished seeds of a run.

    `wanted`: the fingerprints of the plan's results. Numbers come from these if there are several results of one
    evaluation; without a plan, from those that the run directories show.
    """

    label: str
    results: tuple[Lineage, ...]
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DifferentSetting:
    """A setting in which compared results or their inputs differ.

    `where`: the places in which it differs: "" for the results themselves, and for an input its path of roles, such as
    "start.data". `values`: one text for each column, which joins the values of its seeds.
    """

    setting: str
    where: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The label of the row with all places, such as "phase.solver.tol" or "data: group"."""
        first, *others = self.where
        name = f"{first}: {self.setting}" if first else self.setting
        return f"{name} (and of {', '.join(others)})" if others else name


@dataclass(frozen=True)
class NumberRow:
    """A row for one number. `values`: for each column, the value in each of its results that has the number."""

    section: str
    name: str
    values: tuple[tuple[float, ...], ...]


def find_columns(names: Sequence[str], plan: Plan | None) -> list[ComparedColumn]:
    """Return a column for each name; without a plan, each name must be a path. Raises: UserError."""
    found = [_find(name, plan) for name in names]
    # A label that several columns have is replaced by the run directory, or else by the label with the fingerprint.
    tops = [(label, results[0].top) for label, results in found]
    choices = [
        (label, top.run_dir.as_posix(), f"{label} {top.fingerprint[:FINGERPRINT_DIGITS]}") for label, top in tops
    ]
    counts = [Counter(column) for column in zip(*choices, strict=True)]
    labels = [
        next((label for label, count in zip(item, counts, strict=True) if count[label] == 1), item[-1])
        for item in choices
    ]
    wanted = frozenset() if plan is None else plan.fingerprints
    return [ComparedColumn(label, tuple(results), wanted) for label, (_, results) in zip(labels, found, strict=True)]


def is_folder(name: str) -> bool:
    """Return whether the name is written as a path (with a slash, or as "." or "..") and the path exists."""
    return ("/" in name or name in (".", "..")) and Path(name).exists()


def _find(name: str, plan: Plan | None) -> tuple[str, list[Lineage]]:
    if plan is None or is_folder(name):
        result = trace(Path(name))
        return result.top.manifest.name, [result]
    label, keys = find_model(name, plan)
    finished = [path for key in keys if (path := plan.recorded(plan.nodes[key])) is not None]
    if not finished:
        raise NotComparable(f"{name}: has not finished; {how_to_make(plan, [plan.nodes[keys[0]]])}")
    if len(finished) < len(keys):
        label = f"{label} ({len(finished)} of {len(keys)} seeds)"
    evaluated = [key for key, node in plan.nodes.items() if node.upstream.get(MODEL_ROLE) in keys]
    return _marked(label, plan, [*keys, *evaluated]), [trace(path) for path in finished]


def how_to_make(plan: Plan, nodes: Iterable[Node]) -> str:
    """Return a text with the command that makes these results, or that shows what a driver on this machine does."""
    from implicit_llm_workflow.results.job_states import holder_of  # imports psutil, an optional package

    driver = holder_of(plan.driver_lock)
    if driver is not None and driver.is_alive:
        return f"snakemake is running (process {driver.pid}); to follow it, type: implicit-llm status {plan.argument}"
    return f"type: {plan.command_for(nodes)}"


def _marked(label: str, plan: Plan, keys: Iterable[str]) -> str:
    """Return the label, with a mark if the result of any of these jobs is stale."""
    return f"{label} (stale)" if any(plan.statuses[key].state == "stale" for key in keys) else label


def find_model(name: str, plan: Plan) -> tuple[str, list[str]]:
    """Return the full form of a name and the keys of its jobs, which differ only in their seed.

    The name identifies a job, a run and a phase, or a run alone, which means the run's last phase. Without a seed, it
    means all seeds. Raises: UnknownTarget; NotComparable if the experiment has several such runs.
    """
    models = [node for node in plan.nodes.values() if node.stage in MODEL_STAGES]
    nodes = [node for node in models if name.strip("/") in _names(node)]
    if not nodes:
        hint = nearest(name, {run_and_phase(node.key)[0] for node in models})
        raise UnknownTarget(f"{name}: experiment {plan.experiment.name} has no such run; {hint}")
    if len({node.seedless_key for node in nodes}) > 1:  # no phase was named: take the last one
        ends = {node.key: (node.config.get("phase") or {}).get("end_step") for node in nodes}
        nodes = [node for node in nodes if ends[node.key] == node.config.get("total_steps")]
    labels = dict.fromkeys("/".join(run_and_phase(node.seedless_key if len(nodes) > 1 else node.key)) for node in nodes)
    if len(labels) != 1:
        raise NotComparable(f"{name}: means several runs; name one of {', '.join(labels)}")
    return next(iter(labels)), [node.key for node in nodes]


def run_and_phase(key: str) -> tuple[str, str]:
    """Return run and phase of a job: "a5-s0", "free" for "train/a5-s0/free"; the phase of an import is "checkpoint"."""
    stage, _, name = key.partition("/")
    run, _, phase = name.rpartition("/")
    return (run, phase) if run else (name, stage)


def _names(node: Node) -> Iterator[str]:
    for key in (node.key, node.seedless_key):
        run, phase = run_and_phase(key)
        yield from (key, run, f"{run}/{phase}")


def differences(columns: Sequence[ComparedColumn]) -> list[DifferentSetting]:
    """Return the settings in which results or their inputs differ; omit seeds if all columns have the same seeds.

    Inputs with equal fingerprints are not compared. If the same inputs occur in several places, `where` has only the
    first of these places.
    """
    members = [result for column in columns for result in column.results]
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    seen: set[tuple[str, ...]] = set()
    waiting = [("", [member.top for member in members])]
    for where, results in waiting:  # compare all results first, then their inputs by role
        fingerprints = tuple(result.fingerprint for result in results)
        if len(set(fingerprints)) == 1 or fingerprints in seen:
            continue
        seen.add(fingerprints)
        tables = [_settings(result.manifest) for result in results]
        names = dict.fromkeys(chain(*tables))
        is_parent = {
            name for name in names if any(other.startswith(f"{name}.") for other in names)
        }  # for example a solver, which is null in an explicit model
        rows = {name: [table.get(name, MISSING) for table in tables] for name in names if name not in is_parent}
        for role in dict.fromkeys(chain(*(result.manifest.upstream for result in results))):
            wanted = [result.manifest.upstream.get(role) for result in results]
            inputs = [member.runs.get(item or "") for member, item in zip(members, wanted, strict=True)]
            if None in inputs:
                rows[f"input {role}"] = [*map(_input_text, inputs, wanted)]
            else:
                waiting.append((f"{where}.{role}" if where else role, [item for item in inputs if item is not None]))
        for name, texts in rows.items():
            if len(set(texts)) > 1:
                found.setdefault((name, _by_column(columns, texts)), []).append(where)
    return [
        DifferentSetting(setting, tuple(where), values)
        for (setting, values), where in found.items()
        if not (setting == "seed" and len(set(values)) == 1)
    ]


def _by_column(columns: Sequence[ComparedColumn], texts: Iterable[str]) -> tuple[str, ...]:
    """Return one text for each column, which joins the different texts of its results."""
    rest = iter(texts)
    return tuple(", ".join(dict.fromkeys(islice(rest, len(column.results)))) for column in columns)


def _input_text(found: Result | None, fingerprint: str | None) -> str:
    if found is not None:
        return found.key
    return MISSING if fingerprint is None else f"not found ({fingerprint[:FINGERPRINT_DIGITS]})"


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of keys and the value of each leaf of nested mappings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _settings(manifest: Manifest) -> dict[str, str]:
    """Return stage, config and code (its first digits) as texts by dotted key, such as "phase.solver.tol"."""
    config = sorted((".".join(path), value) for path, value in _leaves(manifest.config))
    texts = {key: value if isinstance(value, str) else canonical_json(value) for key, value in config}
    return {"stage": manifest.stage, **texts, "code": manifest.code[:CODE_DIGITS]}


def number_rows(columns: Sequence[ComparedColumn]) -> list[NumberRow]:
    """Return a row for each number that any of the results has, section by section."""
    tables = [[dict(_numbers(result, column.wanted)) for result in column.results] for column in columns]
    names = dict.fromkeys(name for column in tables for numbers in column for name in numbers)
    sections = list(dict.fromkeys(section for section, _ in names))
    return [
        NumberRow(*item, tuple(tuple(found[item] for found in column if item in found) for column in tables))
        for item in sorted(names, key=lambda item: (sections.index(item[0]), natural(item[1])))  # L8 before L16
    ]


def _numbers(result: Lineage, wanted: Container[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the section, name and value of each number of a result."""
    summaries = [(AT_END, {key: item for key, item in result.top.manifest.summary.items() if key != _DATA})]
    summaries += [(f"evaluation {name}", recorded.summary) for name, recorded in _evaluations(result.top, wanted)]
    for section, summary in summaries:
        for path, value in _leaves(summary):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield (section, " ".join(path).removeprefix("metrics ")), float(value)


def _evaluations(model: Result, wanted: Container[str]) -> Iterator[tuple[str, Manifest]]:
    """Yield the name and manifest of each evaluation that has a finished result for exactly this model."""
    folder = model.root / "evaluate" / "/".join(run_and_phase(model.key))
    for run_dir in run_directories(folder):
        paths = [run_dir / MANIFEST, *committed_below(run_dir)]  # the published one comes first
        manifests = filter(None, map(Manifest.find, paths))
        found = [item for item in manifests if item.upstream.get("model") == model.fingerprint]
        if found:
            yield run_dir.name, next((item for item in found if item.fingerprint in wanted), found[0])


def view(columns: Sequence[ComparedColumn]) -> Iterator[RenderableType]:
    """Yield the tables of a comparison; a cell of several seeds has their mean, lowest and highest value.

    A single column has only its numbers.
    """
    sizes = [len(column.results) for column in columns]
    labels = [it.label if size == 1 else f"{it.label} ({size} seeds)" for it, size in zip(columns, sizes, strict=True)]
    if rows := differences(columns):
        yield plain_table("what differs", *labels, rows=[(row.shown, *row.values) for row in rows])
    elif len(columns) > 1:
        yield Text("nothing differs: config, code and inputs are equal")
    numbers = number_rows(columns)
    shown = [row for row in numbers if SWEPT not in row.name]
    for section, group in groupby(shown, lambda row: row.section):
        cells = [[row.name, *_cells(row)] for row in group]
        yield Text()
        yield plain_table(section, *labels, rows=cells, right=labels)
    if swept := len(numbers) - len(shown):
        yield Text(f"\n{swept} numbers of sweeps are in --json", style="dim")


def _cells(row: NumberRow) -> list[str]:
    return [spread_text(values, number_text) for values in row.values]


def as_json(columns: Sequence[ComparedColumn]) -> dict[str, Any]:
    """Return the results of each column, their differences and all numbers of all seeds."""
    return {
        "columns": {column.label: [result.top.run_dir for result in column.results] for column in columns},
        "differences": differences(columns),
        "numbers": number_rows(columns),
    }


def main_numbers(plan: Plan) -> Iterator[Table]:
    """Yield a table of finished runs for each data set: the first metric of each kind of evaluation, without sweeps.

    Values of these metrics at the end of training have rows of their own.
    """
    main = {metric for kind in plan.experiment.kinds.evaluations.values() for metric in kind.metrics[:1]}
    for data in plan.experiment.data:
        runs = [run for run in plan.experiment.runs.values() if run.data == data]
        columns = [column for run in runs for column in _finished(plan, run)]
        rows = [row for row in number_rows(columns) if row.name.split()[0] in main and SWEPT not in row.name]
        order = {f"evaluation {name}": place for place, name in enumerate(plan.experiment.evaluations)}
        rows.sort(key=lambda row: order.get(row.section, -1))  # training first, then as in the file
        if rows:
            labels = [column.label for column in columns]
            names = [f"{row.name} (training)" if row.section == AT_END else row.name for row in rows]
            cells = [[name, *_cells(row)] for name, row in zip(names, rows, strict=True)]
            yield plain_table(data, *labels, rows=cells, right=labels)


def _finished(plan: Plan, run: Run) -> Iterator[ComparedColumn]:
    """Yield a column of the finished seeds for each final phase; the label shows whether a job of the run is stale."""
    jobs = [key for key, node in plan.nodes.items() if node.run == run.name]
    for phase in run.final_phases:
        keys = [f"train/{run.name}-s{seed}/{phase.name}" for seed in run.seeds]
        paths = [path for key in keys if (path := plan.recorded(plan.nodes[key])) is not None]
        if paths:
            label = _marked(f"{run.name}/{phase.name}", plan, jobs)
            results = tuple(Lineage(Result.read(path), None, {}) for path in paths)
            yield ComparedColumn(label, results, plan.fingerprints)


def where_to_look(plan: Plan) -> Iterator[str]:
    """Yield the report's path or the command that makes it, then the URI of MLflow or the command that opens it."""
    report = plan.nodes["report"]
    state, make = plan.statuses[report.key].state, how_to_make(plan, [report])
    yield f"report: {plan.page(report)}" if state == "fresh" else f"report: {state}; {make}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    store = shlex.quote(sqlite_uri(plan.root.parent / "mlflow.db"))
    yield f"MLflow: {without_password(uri)}" if uri else f"MLflow: mlflow ui --backend-store-uri {store}"
