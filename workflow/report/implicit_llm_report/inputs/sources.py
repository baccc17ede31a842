"""Read the finished runs from which a report is made: evaluations, training phases, and the provenance of each.

The report's configuration maps the role of each input to its run, seed, phase and solver, so no name is parsed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import pandas as pd

from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.plugins import BUILTIN, Kinds
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import METRICS, MLFLOW, PROVENANCE
from implicit_llm_contracts.runs.stage_context import Input
from implicit_llm_report.config import VALIDATION, VALIDATION_KINDS, DataPart, ReportConfig, ReportError, ReportJob
from implicit_llm_report.inputs.frame import COSTS, frame_of, groups, plain
from implicit_llm_report.inputs.layers import depths, fewest_layers
from implicit_llm_report.inputs.missing import Record, missing_records
from implicit_llm_report.inputs.published import Published, load_published
from implicit_llm_report.inputs.suites import AVERAGE, load_suites
from implicit_llm_report.inputs.training_runs import Phase, Solver, TrainingRun, grouped

EVALUATE, TRAIN = "evaluate", "train"


@dataclass(frozen=True)
class Source:
    """The source of a number: one finished run, its manifest and its known provenance."""

    role: str
    job: ReportJob
    manifest: Manifest
    provenance: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """The HTML id of the source on the page of all numbers."""
        return "run-" + "".join(letter if letter.isalnum() else "-" for letter in self.role)


@dataclass(frozen=True)
class Given:
    """The input of the report.

    `measured`: the frame (inputs/frame.py) of all numbers that were measured or are missing. `frame`: `measured` with
    the averages of downstream tasks and the fewest layers. It lacks the metrics of a suite's tasks that no column of
    the suite shows.
    """

    config: ReportConfig
    published: Published
    measured: pd.DataFrame
    training: tuple[TrainingRun, ...]
    sources: Mapping[str, Source]
    kinds: Kinds = BUILTIN

    @cached_property
    def frame(self) -> pd.DataFrame:
        found, config = with_suites(self.measured), self.config.minimum_layers
        layers = [] if config is None else [fewest_layers(self.depths, config)]
        return pd.concat([found, *(rows for rows in layers if len(rows))], ignore_index=True)

    @cached_property
    def depths(self) -> pd.DataFrame:
        """The accuracies by depth; empty if the report's configuration has no `minimum_layers`."""
        config = self.config.minimum_layers
        return self.measured[:0] if config is None else depths(self.measured, config)

    @cached_property
    def words(self) -> pd.DataFrame:
        return plain(self.measured, "word_problem")

    @cached_property
    def perplexities(self) -> pd.DataFrame:
        return plain(self.measured, "perplexity")


def with_suites(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with `suite` and `column` filled for downstream tasks, and with rows for the averages.

    An average of a model, mode and seed is NaN if any of its columns has no number, and has no row if none of them has
    a row. A task outside all suites gets a column for each of its metrics. For a task in a suite, metrics that no
    column of the suite shows are left out.
    """
    is_downstream = (frame["kind"] == "lm_eval") & ~frame["metric"].isin(COSTS)
    rows = frame[is_downstream].drop(columns=["suite", "column"])
    places = [
        (one.title, column.label, column.task, column.metric) for one in load_suites() for column in one.all_columns
    ]
    table = pd.DataFrame(places, columns=["suite", "column", "task", "metric"], dtype=object).reset_index(names="order")
    found, keys = [rows], list(zip(rows["task"], rows["metric"], strict=True))
    for suite in load_suites():
        for average, column in zip(suite.averages, suite.average_columns, strict=True):
            wanted = {(one.task, one.metric) for one in suite.columns if one.label in average.columns}
            mine = rows.loc[[key in wanted for key in keys]]
            for one in groups(mine, ("run", "phase", "mode", "seed")):
                value = one.rows["value"].astype(float).mean(skipna=False) if len(one.rows) == len(wanted) else math.nan
                found.append(one.rows[:1].assign(task=column.task, data=column.task, metric=AVERAGE, value=value))
    shown = pd.concat(found).merge(table, how="left", on=["task", "metric"]).sort_values("order", kind="stable")
    shown = shown[shown["column"].notna() | ~shown["task"].isin(table["task"])]
    own = {"suite": "Other tasks", "column": shown["task"] + " " + shown["metric"]}
    # The copy is contiguous in memory, so later filters are faster.
    return pd.concat([frame[~is_downstream], shown.fillna(own).drop(columns="order")]).copy()


def load_inputs(inputs: Mapping[str, Input], config: ReportConfig, kinds: Kinds = BUILTIN) -> Given:
    """Read every input; missing evaluations become rows without a value. Raises: UserError that names the place."""
    unknown = sorted({*inputs, *(item.role for item in config.missing)} - set(config.jobs))
    if unknown:
        raise ReportError(f"input {unknown[0]}: the report's `jobs` do not say what it is; plan the workflow again")
    sources = {
        role: Source(role, config.jobs[role], inputs[role].manifest, _provenance(inputs[role]))
        for role in sorted(inputs)
    }
    found = [
        _placed(source.manifest.config.get("kind", "word_problem"), record, role, config)
        for role, source in sources.items()
        if source.manifest.stage == EVALUATE
        for record in _records(inputs[role])
    ]
    known = [record for _, record in found]
    known += [_trained(source) for source in sources.values() if source.manifest.stage == TRAIN]
    found += [_placed(kind, record, record["role"], config) for kind, record in missing_records(config, known)]
    records = {kind: [record for _, record in mine] for kind, mine in grouped(found, itemgetter(0)).items()}
    training, reasons = _training_runs(sources, inputs, config.names), {item.role: item.why for item in config.missing}
    frame = frame_of(records, reasons, training, config.names, kinds)
    return Given(config, load_published(), frame, training, sources, kinds)


def _trained(source: Source) -> Record:
    """Return the run of a finished training job, its model type, number of layers and training length.

    These values fill the rows of missing evaluations.
    """
    model, data = source.manifest.config.get("model") or {}, source.manifest.summary.get("data") or {}
    about = {"num_layers": model.get("num_hidden_layers"), "train_length": data.get("length")}
    return {"run": source.job.run, "model_type": model.get("model_type"), **about}


def _placed(kind: str, record: Record, role: str, config: ReportConfig) -> tuple[str, Record]:
    """Return the kind of the record, and the record with its role, run, seed, phase, solver, data set and split.

    The kind of numbers on the split "validation" is that in VALIDATION_KINDS, so that no figure or claim confuses them
    with test results.
    """
    job, part = config.jobs[role], config.data.get(str(record.get("data")), DataPart())
    solver = Solver.of(job.solver) if record.get("is_implicit") else None
    about = {"role": role, "run": job.run, "seed": job.seed, "phase": job.phase, "solver": solver}
    kind = VALIDATION_KINDS[kind] if part.split == VALIDATION else kind
    return kind, {**record, **about, "data_set": part.data, "split": part.split}


def _provenance(run: Input) -> dict[str, Any]:
    """Return the fields of provenance.json, or none if it is unreadable, and `mlflow_run_id`, or None if unknown."""
    tracked, recorded = (read_object(run.work / name) for name in (MLFLOW, PROVENANCE))
    return {"mlflow_run_id": tracked.get("run_id"), **recorded}


def _records(run: Input) -> list[Record]:
    file = next(run.manifest.records(lambda path: path.name == METRICS), None)
    if file is None:
        raise ReportError(f"{run.dir}/manifest.json: names no {METRICS}; run the evaluation again")
    path = run.dir / file.path
    try:
        return list(map(dict, json.loads(path.read_text())["records"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: is not the metrics of an evaluation ({error}); run the evaluation again") from error


def _training_runs(
    sources: Mapping[str, Source], inputs: Mapping[str, Input], names: Mapping[str, str]
) -> tuple[TrainingRun, ...]:
    trained = (source for source in sources.values() if source.manifest.stage == TRAIN)
    runs = grouped(trained, lambda one: (one.job.run, one.job.seed, one.manifest.config.get("task")))
    by_steps = attrgetter("start_step", "end_step", "name")
    found = [
        TrainingRun(
            run,
            seed,
            tuple(sorted((_phase(source, inputs[source.role]) for source in mine), key=by_steps)),
            task,
            names.get(run, run),
        )
        for (run, seed, task), mine in runs.items()
    ]
    return tuple(sorted(found, key=lambda run: (natural(run.run), run.seed or 0)))


def _phase(source: Source, run: Input) -> Phase:
    config, points = source.manifest.config, tuple(journal.read(run.journal)) if run.journal.exists() else ()
    settings, length = config.get("phase", {}), (source.manifest.summary.get("data") or {}).get("length")
    return Phase(
        role=source.role,
        name=source.job.phase or "",
        start_step=settings.get("start_step", 0),
        end_step=settings.get("end_step", max((point.step for point in points), default=0)),
        solver=Solver.of(settings.get("solver")),
        points=points,
        fingerprint=source.manifest.fingerprint,
        start=source.manifest.upstream.get("start"),
        step_tokens=config["batch_size"] * length if config.get("batch_size") and length else None,
    )
