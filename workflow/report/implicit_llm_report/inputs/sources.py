"""Reading the finished runs a report is made of: evaluations, training phases, and where each came from.

What an input is (its run, seed, phase and solver) stands in the report's configuration by the input's role: no name is
taken apart.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.manifest import FILE_NAME, FileRecord, Manifest, ManifestError
from implicit_llm_contracts.runs.stage_context import Input
from implicit_llm_report.config import DataPart, Job, MissingResult, ReportConfig, ReportError
from implicit_llm_report.inputs.frame import frame_of
from implicit_llm_report.inputs.training_runs import Phase, Solver, TrainingRun

DATA = "data"


def find_data(inputs: Iterable[Input], wanted: Collection[str]) -> dict[str, Input]:
    """By fingerprint, those of `wanted`."""
    folders = sorted({folder for given in inputs if (folder := _data_folder(given)) is not None})
    found: dict[str, Input] = {}
    for path in (path for folder in folders for path in sorted(folder.glob(f"*/{FILE_NAME}"))):
        try:
            manifest = Manifest.read(path)
        except ManifestError:
            continue  # not an input; `implicit-llm verify` reports it
        if manifest.fingerprint in wanted:
            found.setdefault(manifest.fingerprint, Input(path.parent, manifest))
    return found


def _data_folder(given: Input) -> Path | None:
    """The data sets of the experiment that a run belongs to: results/<experiment>/data."""
    key = f"{given.manifest.stage}/{given.manifest.name}"
    if not given.dir.as_posix().endswith(f"/{key}"):
        return None
    return given.dir.parents[key.count("/")] / DATA


PARALLEL, CHECKPOINT_PHASE = "parallel", "checkpoint"
# What is known of a run, and of a data set, from the records of others.
OF_RUN = ("num_layers", "num_parameters", "model_type", "train_length", "train_hard_fraction")
OF_PHASE = ("train_tokens", "train_flops")
OF_DATA = ("chance_last10", "chance_per_position")

Record = dict[str, Any]
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def missing_records(config: ReportConfig, known: Records) -> Iterator[tuple[str, Record]]:
    """(kind, record) for each accuracy or perplexity that a missing result would have given: without the number.

    Sweeps are left out, as they are from the tables and figures that these go to. `known`: the records that are there.
    """
    for item in config.missing:
        job, kind = config.jobs[item.role], str(item.config.get("kind"))
        if job.evaluation is None or kind not in _RECORDS_OF or item.config.get("sweep"):
            continue
        about: Record = {"role": item.role, "run": job.run, "phase": job.phase, "kind": kind, "seed": job.seed}
        about |= {"source": {} if job.phase == CHECKPOINT_PHASE else None, "is_implicit": bool(item.is_implicit)}
        about |= _shared(known, OF_RUN, {"run": job.run})
        about |= _shared(known, OF_PHASE, {"run": job.run, "phase": job.phase})
        for role, data in item.data.items():
            for record in _RECORDS_OF[kind](item.config, data):
                of_data = _shared(known, OF_DATA, {"data": role, "length": record["length"]})
                for mode in _modes(item):
                    yield kind, {**about, **of_data, "data": role, "mode": mode, **record}


def _modes(item: MissingResult) -> list[str]:
    return [mode["name"] for mode in item.config.get("modes", ())] if item.is_implicit else [PARALLEL]


def _word_problem(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    if config.get("lengths") and data.get("length") not in config["lengths"]:
        return []
    return [{key: data.get(key) for key in ("group", "monoid", "length", "hard_fraction")}]


def _perplexity(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    return [{"length": length} for length in config.get("lengths", ())]


def _catbabi(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    protocols = config.get("protocols", ("windowed",))
    return [{"length": data.get("length"), "protocol": protocol} for protocol in protocols]


_RECORDS_OF = {"word_problem": _word_problem, "perplexity": _perplexity, "catbabi": _catbabi}


def _shared(known: Records, keys: Sequence[str], wanted: Mapping[str, Any]) -> Record:
    """These fields of the first record that agrees with `wanted` and has them."""
    for records in known.values():
        for record in records:
            if all(record.get(key) == value for key, value in wanted.items()):
                found = {key: record[key] for key in keys if record.get(key) is not None}
                if found:
                    return found
    return {}


EVALUATE, TRAIN, CHECKPOINT = "evaluate", "train", "checkpoint"


@dataclass(frozen=True)
class Source:
    """Where a number comes from: one finished run, its manifest and what is known of how it was made."""

    role: str
    stage: str
    name: str
    job: Job
    fingerprint: str
    upstream: Mapping[str, str]
    files: tuple[FileRecord, ...]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return "run-" + "".join(letter if letter.isalnum() else "-" for letter in self.role)


@dataclass(frozen=True)
class ReportInputs:
    """Everything the report knows. `data`: by fingerprint the data sets that lie beside the inputs."""

    training: tuple[TrainingRun, ...]
    sources: Mapping[str, Source]
    data: Mapping[str, Source] = field(default_factory=dict)
    frame: pd.DataFrame = field(default_factory=lambda: frame_of({}, {}))


def load_inputs(inputs: Mapping[str, Input], config: ReportConfig) -> ReportInputs:
    """Read every input; missing results become rows without numbers. Raises: ReportError naming the file."""
    unknown = sorted({*inputs, *(item.role for item in config.missing)} - set(config.jobs))
    if unknown:
        raise ReportError(f"input {unknown[0]}: the report's `jobs` do not say what it is; plan the workflow again")
    sources = {role: _source(role, inputs[role], config.jobs[role]) for role in sorted(inputs)}
    for role, source in sources.items():
        if source.stage not in (EVALUATE, TRAIN, CHECKPOINT):
            raise ReportError(
                f"input {role}: a report is made of evaluate, train and checkpoint runs, not of a {source.stage} run"
            )
    training = _training_runs(sources, inputs)
    records: dict[str, list[dict[str, Any]]] = {}
    for role, source in sources.items():
        if source.stage == EVALUATE:
            placed = [_placed(record, role, config) for record in _records(inputs[role])]
            records.setdefault(source.config.get("kind", "word_problem"), []).extend(placed)
    known = {**records, TRAIN: [_trained(source) for source in sources.values() if source.stage == TRAIN]}
    for kind, record in list(missing_records(config, known)):
        records.setdefault(kind, []).append(_placed(record, record["role"], config))
    return ReportInputs(
        training=training,
        sources=sources,
        data=_data(sources, inputs),
        frame=frame_of(records, {item.role: item.why for item in config.missing}, config.headline_mode, training),
    )


def _trained(source: Source) -> Record:
    """What training tells of a run whose evaluations are missing."""
    model, data = source.config.get("model") or {}, source.summary.get("data") or {}
    about = {"num_layers": model.get("num_hidden_layers"), "train_length": data.get("length")}
    return {"run": source.job.run, "model_type": model.get("model_type"), **about}


def _data(sources: Mapping[str, Source], inputs: Mapping[str, Input]) -> dict[str, Source]:
    made = {source.fingerprint for source in sources.values()}
    wanted = {fingerprint for source in sources.values() for fingerprint in source.upstream.values()} - made
    found = find_data(inputs.values(), wanted)
    return {fingerprint: _source(f"data:{run.manifest.name}", run, Job("")) for fingerprint, run in found.items()}


def _placed(record: Mapping[str, Any], role: str, config: ReportConfig) -> dict[str, Any]:
    """A record with its run, seed, phase and solver, and the data set and split that it is of."""
    job, part = config.jobs[role], config.data.get(str(record.get("data")), DataPart())
    solver = Solver.of(job.solver) if record.get("is_implicit") else None
    about = {"role": role, "run": job.run, "seed": job.seed, "phase": job.phase, "solver": solver}
    return {**record, **about, "data_set": part.data, "split": part.split}


def artifact(run: Input, name: str) -> Path:
    """The file `name` of a run, by its manifest. Raises: ReportError."""
    for record in run.manifest.files:
        if record.path.rsplit("/", 1)[-1] == name:
            return run.dir / record.path
    raise ReportError(f"{run.dir}/manifest.json: names no {name}; run the stage {run.manifest.stage} again")


def _source(role: str, run: Input, job: Job) -> Source:
    manifest = run.manifest
    return Source(
        role=role,
        stage=manifest.stage,
        name=manifest.name,
        job=job,
        fingerprint=manifest.fingerprint,
        upstream=manifest.identity.get("upstream", {}),
        files=manifest.files,
        config=manifest.identity.get("config", {}),
        summary=manifest.summary,
        provenance=_provenance(run),
    )


def _provenance(run: Input) -> dict[str, Any]:
    """What the run recorded beside its result; empty when it recorded nothing that can be read."""
    found: dict[str, Any] = {}
    for path in (run.work / "mlflow.json", run.work / "provenance.json"):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        found |= {"mlflow_run_id": content["run_id"]} if path.name == "mlflow.json" and "run_id" in content else content
    return found


def _records(run: Input) -> list[dict[str, Any]]:
    path = artifact(run, "metrics.json")
    try:
        records = json.loads(path.read_text())["records"]
        return [dict(record) for record in records]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: is not the metrics of an evaluation ({error}); run the evaluation again") from error


def _phase(source: Source, run: Input) -> Phase:
    settings = source.config.get("phase", {})
    points = tuple(journal.read(run.journal)) if run.journal.exists() else ()
    batch_size, length = source.config.get("batch_size"), (source.summary.get("data") or {}).get("length")
    return Phase(
        role=source.role,
        name=source.job.phase or "",
        start_step=settings.get("start_step", 0),
        end_step=settings.get("end_step", max((point.step for point in points), default=0)),
        solver=settings.get("solver"),
        points=points,
        fingerprint=source.fingerprint,
        start=source.upstream.get("start"),
        step_tokens=batch_size * length if batch_size and length else None,
    )


def _training_runs(sources: Mapping[str, Source], inputs: Mapping[str, Input]) -> tuple[TrainingRun, ...]:
    runs: dict[tuple[str, int | None], list[Source]] = {}
    for source in sources.values():
        if source.stage == TRAIN:
            runs.setdefault((source.job.run, source.job.seed), []).append(source)
    keys = sorted(runs, key=lambda key: (natural(key[0]), -1 if key[1] is None else key[1]))
    return tuple(_training_run(key, runs[key], inputs) for key in keys)


def _training_run(key: tuple[str, int | None], phases: list[Source], inputs: Mapping[str, Input]) -> TrainingRun:
    first = phases[0]
    model = first.config.get("model") or {}
    return TrainingRun(
        run=key[0],
        seed=key[1],
        phases=tuple(
            sorted(
                (_phase(source, inputs[source.role]) for source in phases),
                key=lambda phase: (phase.start_step, phase.end_step, phase.name),
            )
        ),
        task=first.config.get("task"),
        model_type=model.get("model_type") or model.get("pretrained"),
        num_parameters=first.summary.get("num_parameters"),
        data=first.upstream.get("data"),
    )
