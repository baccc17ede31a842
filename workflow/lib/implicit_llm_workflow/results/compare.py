"""Numbers of finished results: the main ones of an experiment, and any results side by side.

Of results side by side it also shows in what their settings, code and inputs differ.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from implicit_llm_jobs.tracking.mlflow_store import sqlite_uri
from implicit_llm_workflow.experiment_files.runs import Run
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan, UnknownTarget
from implicit_llm_workflow.results.lineage import Lineage, Result, trace
from implicit_llm_workflow.text import MISSING, number_text, plain_table, spread_text

CODE_DIGITS = 12
AT_END = "at the end (means over the last 50 steps)"
SWEPT = "@"  # in the mode of a number that a sweep gave
MODEL_STAGES = ("train", "checkpoint")
_DATA = "data"  # of a summary: settings, not numbers


class NotComparable(UserError):
    """A name means several runs, or one that has not finished."""


@dataclass(frozen=True)
class ComparedColumn:
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


def find_columns(names: Sequence[str], plan: Plan | None) -> list[ComparedColumn]:
    """A column for each name; without a plan each must be a folder. Raises: UserError."""
    found = [_find(name, plan) for name in names]
    labels = [label for label, _ in found]
    return [
        ComparedColumn(results[0].top.run_dir.as_posix() if labels.count(label) > 1 else label, tuple(results))
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
    finished = [path for key in keys if (path := plan.recorded(plan.nodes[key])) is not None]
    if not finished:
        raise NotComparable(f"{name}: has not finished; type: {plan.command_for([plan.nodes[keys[0]]])}")
    if len(finished) < len(keys):
        label = f"{label} ({len(finished)} of {len(keys)} seeds)"
    return label, [trace(path) for path in finished]


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


def run_and_phase(key: str) -> tuple[str, str]:
    """ "train/a5-s0/free" is a5-s0 and free; an imported checkpoint is a phase of its own name."""
    stage, _, name = key.partition("/")
    run, _, phase = name.rpartition("/")
    return (run, phase) if run else (name, stage)


def _names(node: Node) -> Iterator[str]:
    for key in (node.key, node.seedless_key):
        run, phase = run_and_phase(key)
        yield from (key, run, f"{run}/{phase}")


def differences(columns: Sequence[ComparedColumn]) -> list[DifferentSetting]:
    """What differs, and nothing that is equal; inputs only as far as they differ themselves."""
    members = [result for column in columns for result in column.results]
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    seen: set[tuple[str, ...]] = set()
    waiting = [("", [member.top for member in members])]
    for where, results in waiting:  # from the results to their inputs, those of all members at once
        fingerprints = tuple(result.fingerprint for result in results)
        if len(set(fingerprints)) == 1 or fingerprints in seen:
            continue
        seen.add(fingerprints)
        tables = [_settings(result.manifest) for result in results]
        names = dict.fromkeys(chain(*tables))
        is_parent = {
            name for name in names if any(other.startswith(f"{name}.") for other in names)
        }  # null, of a solver
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
    """The texts, one for each result, together for the results of a column."""
    rest = iter(texts)
    return tuple(", ".join(dict.fromkeys(islice(rest, len(column.results)))) for column in columns)


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


def number_rows(columns: Sequence[ComparedColumn]) -> list[NumberRow]:
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
    for run_dir in run_directories(folder):
        paths = [run_dir / MANIFEST, *committed_below(run_dir)]  # first the one that is shown
        manifests = filter(None, map(Manifest.find, paths))
        found = next((item for item in manifests if item.upstream.get("model") == model.fingerprint), None)
        if found is not None:
            yield run_dir.name, found


def view(columns: Sequence[ComparedColumn]) -> Iterator[RenderableType]:
    """Tables one after the other; of several seeds the mean, the lowest and the highest."""
    sizes = [len(column.results) for column in columns]
    labels = [it.label if size == 1 else f"{it.label} ({size} seeds)" for it, size in zip(columns, sizes, strict=True)]
    if rows := differences(columns):
        yield plain_table("what differs", *labels, rows=[(row.shown, *row.values) for row in rows])
    else:
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
    """The results of each column, what differs, and all numbers of all seeds."""
    return {
        "columns": {column.label: [result.top.run_dir for result in column.results] for column in columns},
        "differences": differences(columns),
        "numbers": number_rows(columns),
    }


def main_numbers(plan: Plan) -> Iterator[Table]:
    """A table for each data set: of the runs that have finished the first metric of each evaluation, without sweeps."""
    main = {metric for kind in plan.experiment.kinds.evaluations.values() for metric in kind.metrics[:1]}
    for data in plan.experiment.data:
        runs = [run for run in plan.experiment.runs.values() if run.data == data]
        columns = [column for run in runs for column in _finished(plan, run)]
        rows = [row for row in number_rows(columns) if row.name.split()[0] in main and SWEPT not in row.name]
        order = {f"evaluation {name}": place for place, name in enumerate(plan.experiment.evaluations)}
        rows.sort(key=lambda row: order.get(row.section, -1))  # as the file has them, which begins with the protocol
        if rows:
            labels = [column.label for column in columns]
            names = [f"{row.name} (training)" if row.section == AT_END else row.name for row in rows]
            cells = [[name, *_cells(row)] for name, row in zip(names, rows, strict=True)]
            yield plain_table(data, *labels, rows=cells, right=labels)


def _finished(plan: Plan, run: Run) -> Iterator[ComparedColumn]:
    """What the run ended with, all seeds together; marked if a result is stale."""
    states = {plan.statuses[key].state for key, node in plan.nodes.items() if node.run == run.name}
    for phase in run.final_phases:
        keys = [f"train/{run.name}-s{seed}/{phase.name}" for seed in run.seeds]
        paths = [path for key in keys if (path := plan.recorded(plan.nodes[key])) is not None]
        if paths:
            label = f"{run.name}/{phase.name}{' (stale)' if 'stale' in states else ''}"
            yield ComparedColumn(label, tuple(Lineage(Result.read(path), None, {}) for path in paths))


def where_to_look(plan: Plan) -> Iterator[str]:
    """The report's path, or the command that makes it; and the command that opens MLflow."""
    page = plan.root / "report/index.html"
    make = plan.command_for([plan.nodes["report"]])
    yield f"report: {page}" if page.is_file() else f"report: not made yet; type: {make}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    store = shlex.quote(sqlite_uri(plan.root.parent / "mlflow.db"))
    yield f"MLflow: {without_password(uri)}" if uri else f"MLflow: mlflow ui --backend-store-uri {store}"
