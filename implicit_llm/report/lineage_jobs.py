"""The jobs of the picture of the lineage: data sets, and for each run its training phases and evaluations.

Runs are rows, seeds stand side by side in a line. A picture of many jobs has a line for all seeds of a phase or an
evaluation, and one of very many a line for all evaluations of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from implicit_llm.report.config import DataPart, Hole, ReportConfig
from implicit_llm.report.config import Job as Known
from implicit_llm.report.inputs import CHECKPOINT, EVALUATE, TRAIN, ReportInputs, Source

MANY_JOBS, VERY_MANY_LINES = 120, 160
SHORT = 8  # digits of a fingerprint or of an MLflow run


@dataclass(frozen=True)
class Job:
    """A finished job, or one that is missing (`state` says how); `part` is its phase or evaluation."""

    role: str
    run: str
    part: str
    seed: str
    fingerprint: str = ""
    mlflow_run_id: str | None = None
    anchor: str | None = None
    state: str = ""
    is_explicit: bool = False

    @property
    def words(self) -> str:
        """Everything about it, for the reader who points at it."""
        if self.state:
            return f"{self.role}: {self.state}"
        return f"{self.role}\nfingerprint {self.fingerprint}\nMLflow run {self.mlflow_run_id or 'not tracked'}"


@dataclass(frozen=True)
class Line:
    """A line of a box: one job, or several that are alike."""

    label: str
    jobs: tuple[Job, ...]

    @property
    def ids(self) -> str:
        """Fingerprint and MLflow run of the first job, and how many more there are."""
        missing = [job for job in self.jobs if job.state]
        if missing:
            rest = len(self.jobs) - len(missing)
            return f"{missing[0].state}" + (f", {rest} there" if rest else "")
        first = self.jobs[0]
        tracked = f" · {first.mlflow_run_id[:SHORT]}" if first.mlflow_run_id else ""
        more = f" +{len(self.jobs) - 1}" if len(self.jobs) > 1 else ""
        return f"{first.fingerprint[:SHORT]}{tracked}{more}"

    @property
    def is_missing(self) -> bool:
        return any(job.state for job in self.jobs)


@dataclass(frozen=True)
class RunRow:
    """One run: what it was trained on, its phases and its evaluations."""

    name: str
    data: str
    training: tuple[Line, ...]
    evaluations: tuple[Line, ...]


@dataclass(frozen=True)
class LineageJobs:
    """`data`: the lines of each group of data sets; `rows`: the runs, those on the same data together."""

    data: Mapping[str, tuple[Line, ...]]
    rows: tuple[RunRow, ...]
    num_jobs: int


def lineage_jobs(inputs: ReportInputs, config: ReportConfig) -> LineageJobs:
    """The jobs behind a report, arranged."""
    jobs = [_job(source) for source in sorted(inputs.sources.values(), key=_order)]
    jobs += [_hole(hole, config.jobs[hole.role]) for hole in config.holes if hole.role not in inputs.sources]
    groups = _data_groups(inputs, config.data)
    data_of = {source.job.run: group for source in inputs.sources.values() for group in _groups_of(source, groups)}
    num_jobs = len(jobs) + len({item for lines in groups.values() for item in lines})
    has_many = num_jobs > MANY_JOBS
    rows = [_row(name, mine, data_of.get(name, ""), has_many) for name, mine in _by_run(jobs).items()]
    if sum(max(len(row.training), len(row.evaluations)) for row in rows) > VERY_MANY_LINES:
        rows = [RunRow(row.name, row.data, row.training, _as_one(row.evaluations)) for row in rows]
    rows.sort(key=lambda row: (row.data, row.name))
    shown = {row.data for row in rows}
    lines = {
        group: tuple(Line(name.removeprefix(f"{group}-"), (job,)) for name, job in items.items())
        for group, items in groups.items()
        if group in shown
    }
    return LineageJobs(lines, tuple(rows), num_jobs)


def _order(source: Source) -> tuple:
    """Phases as they follow one another, else by role."""
    phase = source.config.get("phase") or {}
    return (phase.get("start_step", 0), phase.get("end_step", 0), source.role)


def _job(source: Source) -> Job:
    return Job(
        source.role,
        source.job.run,
        "imported" if source.stage == CHECKPOINT else _part(source.job),
        _seed(source.job),
        source.fingerprint,
        source.provenance.get("mlflow_run_id"),
        source.anchor,
        is_explicit=source.stage == TRAIN and source.job.solver is None,
    )


def _hole(hole: Hole, known: Known) -> Job:
    return Job(hole.role, known.run, _part(known), _seed(known), state=hole.state, is_explicit=known.solver is None)


def _seed(known: Known) -> str:
    return "" if known.seed is None else str(known.seed)


def _part(known: Known) -> str:
    """ "free" for training, "word-problem (free)" for an evaluation."""
    return f"{known.evaluation} ({known.phase})" if known.evaluation else known.phase or ""


def _by_run(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.run, []).append(job)
    return found


def _row(name: str, jobs: Sequence[Job], data: str, has_many: bool) -> RunRow:
    evaluations = [job for job in jobs if job.role.startswith(f"{EVALUATE}:")]
    training = [job for job in jobs if job not in evaluations]
    return RunRow(name, data, _lines(training, has_many), _lines(evaluations, has_many))


def _lines(jobs: Sequence[Job], has_many: bool) -> tuple[Line, ...]:
    by_part: dict[str, list[Job]] = {}
    for job in jobs:
        by_part.setdefault(job.part, []).append(job)
    if has_many:
        return tuple(Line(_with_seeds(part, mine), tuple(mine)) for part, mine in by_part.items())
    has_seeds = len({job.seed for job in jobs}) > 1
    return tuple(
        Line(f"{part}, seed {job.seed}" if has_seeds and job.seed else part, (job,))
        for part, mine in by_part.items()
        for job in mine
    )


def _with_seeds(part: str, jobs: Sequence[Job]) -> str:
    return f"{part}, {len(jobs)} seeds" if len(jobs) > 1 else part


def _as_one(lines: Sequence[Line]) -> tuple[Line, ...]:
    jobs = tuple(job for line in lines for job in line.jobs)
    return (Line(f"{len(jobs)} evaluations", jobs),) if len(lines) > 1 else tuple(lines)


def _data_groups(inputs: ReportInputs, parts: Mapping[str, DataPart]) -> dict[str, dict[str, Job]]:
    """By data set its parts by name; one that is gone by its fingerprint."""
    groups: dict[str, dict[str, Job]] = {}
    for source in inputs.sources.values():
        for role, fingerprint in source.upstream.items():
            if role in ("model", "start") or (source.stage != TRAIN and source.stage != EVALUATE):
                continue
            known = inputs.data.get(fingerprint)
            name = known.name if known else role if role != "data" else f"data {fingerprint[:SHORT]}"
            tracked = known.provenance.get("mlflow_run_id") if known else None
            job = Job(f"data:{name}", "", name, "", fingerprint, tracked)
            groups.setdefault(parts.get(name, DataPart(name)).data or name, {}).setdefault(name, job)
    return {group: dict(sorted(items.items())) for group, items in sorted(groups.items())}


def _groups_of(source: Source, groups: Mapping[str, Mapping[str, Job]]) -> list[str]:
    """The group that a run reads; training comes after evaluations here, and decides."""
    read = set(source.upstream.values())
    return [group for group, items in groups.items() if any(job.fingerprint in read for job in items.values())]
