"""Brings one journal to one MLflow run, from where it was left; every step may be repeated without harm.

`mlflow.json` in the work directory remembers the run and how far the journal was brought. Its random `key` is written
before the run is created and is a tag of the run: a process killed between the two finds its run again. Points carry
the time of their journal line, so that a batch written twice is equal, and an SQL store keeps equal points once.

Above the runs that began in one invocation of Snakemake stands a run of its own. A run stays below the invocation that
began it. Later ones that work on it are added to its tag `invocations`, by which their own run leads to it. The driver
does not load MLflow, so whoever brings the first run of an invocation makes it, and each run that ends updates its
status.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import (
    JOURNAL,
    MANIFEST,
    MLFLOW,
    JournalTail,
    Point,
    point_of,
    read_object,
    write_json,
)
from implicit_llm_jobs.tracking.mlflow_client import PARENT_TAG, Client
from implicit_llm_jobs.tracking.mlflow_store import alone, quiet
from implicit_llm_jobs.tracking.tracked_run import MODEL_ROLE, TAG, TrackedRun

# Keys of metrics in MLflow are those of the journal, in the sections that its charts make of a slash. A key, once
# given, stays: charts, searches and stores of earlier runs name it. What is not listed keeps the journal's name, in the
# section of its stage. Of training, by section; "" is the one that MLflow calls "Model metrics".
TRAINING: dict[str, dict[str, str]] = {
    "": {
        "loss": "nats per label, over the steps since the last point",
        "accuracy": "share of right labels of the training batches (CatbAbI)",
        "accuracy_last10": "share of right labels among the last ten of a sequence (word problems)",
        "grad_norm": "norm of the gradient before clipping",
        "learning_rate": "of the step",
    },
    "solver": {
        "num_iter": "iterations of the solver, mean over sequences",
        "f_evaluations": "num_iter and the phantom or unrolled steps after it",
        "residual": "largest relative residual of a batch",
        "unconverged_share": "share of the tokens without a fixed point",
        "mode_gap": "loss in evaluation mode minus that in training mode, on the same tokens",
        "spectral_radius": "of the Jacobian at the fixed point",
    },
    "cost": {
        "tokens": "trained on since the first phase",
        "flops": "spent since the first phase",
        "tokens_per_s": "over all processes",
        "flops_per_s": "over all processes",
        "mfu": "share of the peak of the devices",
        "memory_gib": "largest use of a GPU's memory",
    },
}
SECTIONS = {"evaluate": "evaluation", "data": "data"}  # of other stages: accuracy.<data set>.<mode>, and the like
SUMMARY = "summary"  # one number a run, from its manifest, for tables and parallel coordinates
SYSTEM = "system"  # of the machine, with MLflow's own names; MLflow has a page for them

KEY_CHARS = 200
_REFUSED = re.compile(r"[^\w\-. /:]")  # by MLflow
_SECTION_OF = {key: section for section, keys in TRAINING.items() for key in keys}


def mlflow_key(stage: str, key: str) -> str:
    """The key under which MLflow has the journal's `key`; one that has a section stays in it."""
    key = _REFUSED.sub("-", key.replace("@", "."))[:KEY_CHARS]
    section = "" if "/" in key else _SECTION_OF.get(key, "") if stage == "train" else SECTIONS.get(stage, "")
    return f"{section}/{key}" if section else key


# Units of what is measured on the machine and so differs between equal trajectories (`tokens_per_s`, `memory_mib`).
MEASURED_SUFFIXES = ("_s", "_mib", "_utilisation")


@dataclass(frozen=True)
class BranchPoint:
    """Metrics to log, and the number of the branch they belong to (0: no resume went another way)."""

    branch: int
    point: Point


class Trajectory:
    """Takes the records of a journal from its first line and says what is new in each.

    MLflow keeps every point it ever got and cannot delete one. After a rewind the points of the steps that are trained
    again are already there, and equal, because a resume is bitwise equal: those are left out. A resume that goes
    another way makes a branch, which the bridge puts into a child run.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[str, float]] = {}
        self._branch = 0
        self._is_rewound = False
        self._is_branching = False
        self.summary: BranchPoint | None = None  # of the last end of the stage, as it was taken

    def take(self, record: Mapping[str, Any]) -> BranchPoint | None:
        """The new metrics of a record, None when it has none."""
        if record["kind"] == "rewind":
            self._is_rewound, self._is_branching = True, False
            return None
        point = _point(record)
        if point is None:
            return None
        known = self._known.setdefault(point.step, {})
        if self._is_rewound and not self._is_branching and _differs(known, point.values):
            self._is_branching = True
            self._branch += 1
        values = point.values if self._is_branching else {k: v for k, v in point.values.items() if k not in known}
        known.update(values)
        if not values:
            return None
        taken = BranchPoint(self._branch, Point(point.step, point.time, values))
        if record["kind"] == "event":
            self.summary = taken
        return taken


def _point(record: Mapping[str, Any]) -> Point | None:
    if record["kind"] == "metrics":
        return point_of(record)
    if record.get("name") == "stage_finished":
        numbers = _summary_numbers(record.get("summary") or {})
        return Point(0, record["time"], {f"{SUMMARY}/{key}": value for key, value in numbers.items()})
    return None


def _differs(known: Mapping[str, float], values: Mapping[str, float]) -> bool:
    return any(
        key in known and known[key] != value and not (math.isnan(known[key]) and math.isnan(value))
        for key, value in values.items()
        if not key.endswith(MEASURED_SUFFIXES)
    )


def _summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary's own numbers, those of its `metrics`, and the best ones by data set."""
    found = {key: value for key, value in summary.items() if _is_number(value)}
    for key, values in summary.items():
        if isinstance(values, Mapping) and (key == "metrics" or key.startswith("best_")):
            prefix = "" if key == "metrics" else f"{key}."
            found |= {f"{prefix}{name}": value for name, value in values.items() if _is_number(value)}
    return {key: float(value) for key, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


log = logging.getLogger(__name__)

LOCK = ".mlflow.lock"  # in a work directory, and in that of the experiment
LINES_PER_SAVE = 1000
_PARENT_KEY = "invocation-{}"


@dataclass(frozen=True)
class BridgeState:
    """`branches`: ids of the child runs, one for each resume that went another way.

    `model_id`: the logged model, "" for a finished run that made none. `lines_written` of the journal,
    `machine_lines` of that of the machine.
    """

    key: str
    run_id: str | None = None
    branches: tuple[str, ...] = ()
    lines_written: int = 0
    status: str = "RUNNING"
    machine_lines: int = 0
    model_id: str | None = None

    @classmethod
    def read(cls, work: Path) -> BridgeState | None:
        """None when there is none or it is damaged."""
        values = read_object(work / MLFLOW)
        return cls(**{**values, "branches": tuple(values["branches"])}) if values else None


class Bridge:
    """Not for more than one thread; other processes may bring the same run, one after the other."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self._client: Client | None = None
        self._state = BridgeState("")

    def bring(self) -> None:
        """Bring what is new in the journal, the status that it tells of included.

        Raises: whatever MLflow or the file system raises; the next call goes on from what was done.
        """
        with quiet(), alone(self.run.work / LOCK):
            try:
                client = self._connect()
                self._bring_points(client)
                self._bring_machine(client)
                if self._status == "FINISHED" and self._state.model_id is None:
                    self._bring_products(client)
                if self._status != self._state.status:
                    self._set_status(client)
            except BaseException:
                self._client = None  # the next call connects again and reads the journal from its first line
                raise

    def _connect(self) -> Client:
        state = BridgeState.read(self.run.work)
        if self._client is not None and state == self._state:
            return self._client
        client = Client(self.run.uri, self.run.experiment)
        if state is not None and state.run_id not in (None, client.find_run(state.key)):
            log.info("MLflow does not have the run %s any more; starting another", state.run_id)
            state = None
        self._state = state or BridgeState(secrets.token_hex(16))
        self._save()
        # Also of a run that is there: it may go on in another invocation, or be older than a tag.
        tags = self._tags()
        parents = find_or_create_parents(client, self.run)
        if self._state.run_id is None:
            below = {PARENT_TAG: parents[0]} if parents else {}
            started = self.run.times()[0]
            self._save(run_id=client.find_or_create_run(self.run.title, self._state.key, tags | below, started))
        client.log_config(self._run_ids()[0], self.run.config, tags)
        client.log_inputs(self._run_ids()[0], self.run, self._given_model())
        self._trajectory, self._journal = Trajectory(), JournalTail(self.run.journal)
        self._machine = JournalTail(self.run.machine_journal)
        self._status = "RUNNING"
        self._client = client
        return client

    def _bring_points(self, client: Client) -> None:
        pending: list[BranchPoint] = []
        lines = self._journal.lines
        records = self._journal.new_records()
        self._status = self.run.status(records) or self._status
        for record in records:
            lines += 1
            point = self._trajectory.take(record)
            if lines <= self._state.lines_written:
                continue
            if point is not None:
                pending.append(point)
            if len(pending) >= LINES_PER_SAVE:
                self._log(client, pending, lines)
                pending = []
        self._log(client, pending, lines)

    def _log(self, client: Client, points: list[BranchPoint], lines: int) -> None:
        model = self._given_model()
        for branch, group in groupby(points, key=lambda point: point.branch):
            some = [self._named(point.point) for point in group]
            client.log_points(self._branch_run(client, branch, some[0].time), some, model)
        if lines > self._state.lines_written:
            self._save(lines_written=lines)

    def _bring_machine(self, client: Client) -> None:
        """Metrics of the machine belong to the run itself, whichever way its resumes went."""
        before = self._machine.lines
        records = self._machine.new_records()
        new = records[max(0, self._state.machine_lines - before) :]
        if new:
            points = [Point(record["step"], record["time"], record["values"]) for record in new]
            client.log_points(self._run_ids()[0], points)
            self._save(machine_lines=self._machine.lines)

    def _bring_products(self, client: Client) -> None:
        """The model that a finished run made, with the numbers of its summary; and tags that only its result tells."""
        run_id = self._run_ids()[0]
        client.log_config(run_id, {}, self._tags())
        model_id = client.find_or_create_model(run_id, self.run)
        summary = self._trajectory.summary
        if model_id is not None and summary is not None:
            client.log_points(self._run_ids()[summary.branch], [self._named(summary.point)], model_id)
        self._save(model_id=model_id or "")

    def _set_status(self, client: Client) -> None:
        for run_id in self._run_ids():
            client.set_status(run_id, self._status, self.run.times()[1])
        close_parents(client, self.run)
        self._save(status=self._status)

    def _branch_run(self, client: Client, branch: int, started: str) -> str:
        while len(self._state.branches) < branch:
            number = len(self._state.branches) + 1
            tags = {**self._tags(), PARENT_TAG: self._run_ids()[0], "branch": str(number)}
            log.warning("%s: the resume went another way; MLflow shows it as branch %d", self.run.title, number)
            name, key = f"{self.run.title} branch {number}", f"{self._state.key}.{number}"
            self._save(branches=(*self._state.branches, client.find_or_create_run(name, key, tags, started)))
        return self._run_ids()[branch]

    def _named(self, point: Point) -> Point:
        return replace(point, values={mlflow_key(self.run.stage, key): value for key, value in point.values.items()})

    def _tags(self) -> dict[str, str]:
        states = {role: BridgeState.read(work) for role, work in self.run.inputs.items()}
        return self.run.tags({role: state.run_id for role, state in states.items() if state and state.run_id})

    def _given_model(self) -> str | None:
        """Id of the logged model that the run reads."""
        work = self.run.inputs.get(MODEL_ROLE)
        state = BridgeState.read(work) if work else None
        return (state.model_id or None) if state else None

    def _run_ids(self) -> list[str]:
        assert self._state.run_id is not None
        return [self._state.run_id, *self._state.branches]

    def _save(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        write_json(self.run.work / MLFLOW, self._state)


def is_complete(work: Path) -> bool:
    """Whether the whole journal of a run that has ended was brought, or there is none."""
    try:
        lines = (work / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return True
    state = BridgeState.read(work)
    if state is None or state.lines_written < lines:
        return False
    return state.status == "FINISHED" if (work / MANIFEST).is_file() else state.status != "RUNNING"


def find_or_create_parents(client: Client, run: TrackedRun) -> list[str]:
    """MLflow ids of the invocations that worked on the run, in their order."""
    invocations = run.invocations()
    if not invocations:
        return []
    with alone(run.config_dir / LOCK):  # jobs that start at the same time would each make one
        return [
            client.find_or_create_run(item.name, _PARENT_KEY.format(item.id), item.tags(run.experiment), item.started)
            for item in invocations
        ]


def close_parents(client: Client, run: TrackedRun) -> None:
    """Set the status of the run's invocations from those of all their runs."""
    for item in run.invocations():
        with alone(run.config_dir / LOCK):  # or a job would write what it saw before another one ended
            run_id = client.find_run(_PARENT_KEY.format(item.id))
            if run_id is None:  # someone has deleted it
                continue
            found = client.statuses(TAG, item.id)
            status = "RUNNING" if found & {"RUNNING", "SCHEDULED"} else "FAILED" if found - {"FINISHED"} else "FINISHED"
            client.set_status(run_id, status, run.times()[1])
