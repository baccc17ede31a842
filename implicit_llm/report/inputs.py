"""Reading the finished runs a report is made of: evaluations, training phases, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm.report.config import ReportError
from implicit_llm.report.results import Point
from implicit_llm.runs.manifest import FileRecord
from implicit_llm.runs.stage import Input
from implicit_llm.tracking import journal

EVALUATE, TRAIN = "evaluate", "train"


@dataclass(frozen=True)
class Source:
    """Where a number comes from: one finished run, its manifest and what is known of how it was made."""

    role: str
    stage: str
    name: str
    fingerprint: str
    upstream: Mapping[str, str]
    files: tuple[FileRecord, ...]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return "run-" + "".join(letter if letter.isalnum() else "-" for letter in self.role)


@dataclass(frozen=True)
class Phase:
    """One phase of a training run: steps start_step + 1 .. end_step and the points of its journal."""

    role: str
    name: str
    start_step: int
    end_step: int
    solver: Mapping[str, Any] | None
    points: tuple[journal.Point, ...]

    @property
    def label(self) -> str:
        """The paper's short form: "unrolled 4", "free 16+4"; a model without solver is "explicit"."""
        if self.solver is None:
            return "explicit"
        if self.solver.get("mode") == "unrolled":
            return f"unrolled {self.solver.get('num_unroll')}"
        return f"free {self.solver.get('max_iter')}+{self.solver.get('phantom_steps')}"


@dataclass(frozen=True)
class TrainingRun:
    """The phases of one run and seed, in order."""

    run: str
    seed: int | None
    phases: tuple[Phase, ...]

    @property
    def is_implicit(self) -> bool:
        return any(phase.solver is not None for phase in self.phases)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Global steps and values of a journal key over all phases; steps without it are left out."""
        pairs = [(p.step, p.values[key]) for phase in self.phases for p in phase.points if key in p.values]
        return [step for step, _ in pairs], [value for _, value in pairs]


@dataclass(frozen=True)
class ReportInputs:
    """Everything the report knows."""

    points: tuple[Point, ...]
    training: tuple[TrainingRun, ...]
    sources: Mapping[str, Source]


def load_inputs(inputs: Mapping[str, Input]) -> ReportInputs:
    """Read every input; roles are "evaluate:<run>" and "train:<run>/<phase>". Raises: ReportError naming the file."""
    points: list[Point] = []
    phases: list[tuple[str, int | None, Phase]] = []
    sources: dict[str, Source] = {}
    for role in sorted(inputs):
        source = sources[role] = _source(role, inputs[role])
        if source.stage == EVALUATE:
            points += _points(role, inputs[role])
        elif source.stage == TRAIN:
            phases.append(_phase(source, inputs[role]))
        else:
            raise ReportError(f"input {role}: a report is made of evaluate and train runs, not of a {source.stage} run")
    return ReportInputs(tuple(points), _training_runs(phases), sources)


def artifact(run: Input, name: str) -> Path:
    """The file `name` of a run, by its manifest. Raises: ReportError."""
    for record in run.manifest.files:
        if record.path.rsplit("/", 1)[-1] == name:
            return run.dir / record.path
    raise ReportError(f"{run.dir}/manifest.json: names no {name}; run the stage {run.manifest.stage} again")


def _source(role: str, run: Input) -> Source:
    manifest = run.manifest
    return Source(
        role=role,
        stage=manifest.stage,
        name=manifest.name,
        fingerprint=manifest.fingerprint,
        upstream=manifest.identity.get("upstream", {}),
        files=manifest.files,
        config=manifest.identity.get("config", {}),
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


def _points(role: str, run: Input) -> list[Point]:
    path = artifact(run, "metrics.json")
    try:
        records = json.loads(path.read_text())["records"]
        return [Point.from_record(record, role) for record in records]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: is not the metrics of an evaluation ({error}); run the evaluation again") from error


def _phase(source: Source, run: Input) -> tuple[str, int | None, Phase]:
    settings = source.config.get("phase", {})
    points = tuple(journal.read(run.journal)) if run.journal.exists() else ()
    name, _, phase_name = source.name.partition("/")
    phase = Phase(
        role=source.role,
        name=phase_name or settings.get("name", ""),
        start_step=settings.get("start_step", 0),
        end_step=settings.get("end_step", max((point.step for point in points), default=0)),
        solver=settings.get("solver"),
        points=points,
    )
    return run_name(name), source.config.get("seed"), phase


def run_name(name: str) -> str:
    """The run without its seed: "a5-implicit-s0" is "a5-implicit"."""
    stem, dash, seed = name.rpartition("-s")
    return stem if dash and seed.isdigit() else name


def _training_runs(phases: Iterable[tuple[str, int | None, Phase]]) -> tuple[TrainingRun, ...]:
    runs: dict[tuple[str, int | None], list[Phase]] = {}
    for run, seed, phase in phases:
        runs.setdefault((run, seed), []).append(phase)
    keys = sorted(runs, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    return tuple(TrainingRun(*key, tuple(sorted(runs[key], key=lambda phase: phase.start_step))) for key in keys)
