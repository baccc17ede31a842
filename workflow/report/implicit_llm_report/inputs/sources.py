"""Read the finished runs that a report is made of: evaluations, training phases, and the origin of each.

The report's configuration describes each input (its run, seed, phase and solver) by its role, so no name is parsed.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
from implicit_llm_report.inputs.frame import frame_of, plain
from implicit_llm_report.inputs.layers import depths, fewest_layers
from implicit_llm_report.inputs.missing import Record, missing_records
from implicit_llm_report.inputs.published import Published, load_published
from implicit_llm_report.inputs.suites import with_suites
from implicit_llm_report.inputs.training_runs import Phase, Solver, TrainingRun

EVALUATE, TRAIN = "evaluate", "train"


@dataclass(frozen=True)
class Source:
    """The source of a number: one finished run, with its manifest and its provenance as far as it is known."""

    role: str
    job: ReportJob
    manifest: Manifest
    provenance: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """The id of the source on the page."""
        return "run-" + "".join(letter if letter.isalnum() else "-" for letter in self.role)


@dataclass(frozen=True)
class Given:
    """All data of the report.

    `measured`: the numbers that were measured or are missing; `frame` adds the averages of downstream tasks and the
    fewest layers.
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
        """The accuracies by depth; empty if the report's configuration names no group."""
        config = self.config.minimum_layers
        return self.measured[:0] if config is None else depths(self.measured, config)

    @cached_property
    def words(self) -> pd.DataFrame:
        return plain(self.measured, "word_problem")

    @cached_property
    def perplexities(self) -> pd.DataFrame:
        return plain(self.measured, "perplexity")


def load_inputs(inputs: Mapping[str, Input], config: ReportConfig, kinds: Kinds = BUILTIN) -> Given:
    """Read every input; missing results become rows without numbers. Raises: ReportError that names the file."""
    unknown = sorted({*inputs, *(item.role for item in config.missing)} - set(config.jobs))
    if unknown:
        raise ReportError(f"input {unknown[0]}: the report's `jobs` do not say what it is; plan the workflow again")
    sources = {
        role: Source(role, config.jobs[role], inputs[role].manifest, _provenance(inputs[role]))
        for role in sorted(inputs)
    }
    records: dict[str, list[Record]] = {}
    trained: list[Record] = []
    for role, source in sources.items():
        if source.manifest.stage == EVALUATE:
            for record in _records(inputs[role]):
                _place(records, source.manifest.config.get("kind", "word_problem"), record, role, config)
        if source.manifest.stage == TRAIN:
            trained.append(_trained(source))
    for kind, record in list(missing_records(config, {**records, TRAIN: trained})):
        _place(records, kind, record, record["role"], config)
    training, reasons = _training_runs(sources, inputs, config.names), {item.role: item.why for item in config.missing}
    frame = frame_of(records, reasons, training, config.names, kinds)
    return Given(config, load_published(), frame, training, sources, kinds)


def _trained(source: Source) -> Record:
    """Return the fields that training records for a run whose evaluations are missing."""
    model, data = source.manifest.config.get("model") or {}, source.manifest.summary.get("data") or {}
    about = {"num_layers": model.get("num_hidden_layers"), "train_length": data.get("length")}
    return {"run": source.job.run, "model_type": model.get("model_type"), **about}


def _place(records: dict[str, list[Record]], kind: str, record: Record, role: str, config: ReportConfig) -> None:
    """Add a record with its run, seed, phase and solver, and with its data set and split.

    Numbers of validation sets have their own kind, so that no figure or claim uses them as those of a test.
    """
    job, part = config.jobs[role], config.data.get(str(record.get("data")), DataPart())
    solver = Solver.of(job.solver) if record.get("is_implicit") else None
    about = {"role": role, "run": job.run, "seed": job.seed, "phase": job.phase, "solver": solver}
    kind = VALIDATION_KINDS[kind] if part.split == VALIDATION else kind
    records.setdefault(kind, []).append({**record, **about, "data_set": part.data, "split": part.split})


def _provenance(run: Input) -> dict[str, Any]:
    """Return the provenance that the run recorded beside its result, as far as it can be read."""
    tracked, recorded = (read_object(run.work / name) for name in (MLFLOW, PROVENANCE))
    return {"mlflow_run_id": tracked.get("run_id"), **recorded}


def _records(run: Input) -> list[Record]:
    file = next(run.manifest.records(lambda path: path.name == METRICS), None)
    if file is None:
        raise ReportError(f"{run.dir}/manifest.json: names no {METRICS}; run the evaluation again")
    path = run.dir / file.path
    try:
        return [dict(record) for record in json.loads(path.read_text())["records"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: is not the metrics of an evaluation ({error}); run the evaluation again") from error


def _training_runs(
    sources: Mapping[str, Source], inputs: Mapping[str, Input], names: Mapping[str, str]
) -> tuple[TrainingRun, ...]:
    runs: defaultdict[tuple, list[Phase]] = defaultdict(list)
    for role, source in sources.items():
        if source.manifest.stage == TRAIN:
            runs[source.job.run, source.job.seed, source.manifest.config.get("task")].append(
                _phase(source, inputs[role])
            )
    found = [
        TrainingRun(
            run,
            seed,
            tuple(sorted(phases, key=lambda one: (one.start_step, one.end_step, one.name))),
            task,
            names.get(run, run),
        )
        for (run, seed, task), phases in runs.items()
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
