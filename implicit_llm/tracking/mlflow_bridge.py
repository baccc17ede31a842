"""Brings one journal to one MLflow run, from where it was left; every step may be repeated without harm.

`mlflow.json` in the work directory remembers the run and how far the journal was brought. Its random `key` is written
before the run is created and is a tag of the run: a process killed between the two finds its run again. Points carry
the time of their journal line, so that a batch written twice is equal, and an SQL store keeps equal points once.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from implicit_llm.runs.atomic import write_atomic
from implicit_llm.tracking.journal import parse_lines
from implicit_llm.tracking.mlflow_client import Client
from implicit_llm.tracking.mlflow_store import default_uri, quiet
from implicit_llm.tracking.trajectory import BranchPoint, Trajectory

log = logging.getLogger(__name__)

STATE = "mlflow.json"
LINES_PER_SAVE = 1000


@dataclass(frozen=True)
class TrackedRun:
    """What MLflow is told of a run; `upstream` gives the MLflow run id of each input, None where there is none."""

    run_dir: Path
    work: Path
    stage: str
    name: str
    fingerprint: str
    config: Mapping[str, Any]
    upstream: Mapping[str, str | None] = field(default_factory=dict)
    commit: str | None = None

    @property
    def journal(self) -> Path:
        return self.work / "journal.jsonl"

    @property
    def config_dir(self) -> Path:
        """results/<config>; for a run directory of another shape, its parent."""
        tail = Path(self.stage, self.name).parts
        for parts in (tail, tail[:1]):
            if self.run_dir.parts[-len(parts) :] == parts:
                return self.run_dir.parents[len(parts) - 1]
        return self.run_dir.parent

    @property
    def uri(self) -> str:
        return default_uri(self.config_dir.parent)


@dataclass(frozen=True)
class BridgeState:
    """`branches`: ids of the child runs, one for each resume that went another way."""

    key: str
    run_id: str | None = None
    branches: tuple[str, ...] = ()
    lines_written: int = 0
    status: str = "RUNNING"

    @classmethod
    def read(cls, work: Path) -> BridgeState | None:
        """None when there is none or it is damaged."""
        try:
            values = json.loads((work / STATE).read_bytes())
            return cls(**{**values, "branches": tuple(values["branches"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Bridge:
    """Not for more than one thread."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.run_id: str | None = None
        self._client: Client | None = None
        self._state = BridgeState("")
        self._trajectory = Trajectory()
        self._bytes_read = 0
        self._lines_read = 0

    def bring(self, status: str | None = None) -> None:
        """Bring what is new in the journal, then set the run's status if one is given.

        Raises: whatever MLflow or the file system raises; the next call goes on from what was done.
        """
        with quiet():
            try:
                client = self._connect()
                self._bring_points(client)
                if status is not None and status != self._state.status:
                    for run_id in self._run_ids():
                        client.set_status(run_id, status)
                    self._save(status=status)
            except BaseException:
                self._client = None  # the next call connects again and reads the journal from its first line
                raise

    def _connect(self) -> Client:
        if self._client is not None:
            return self._client
        client = Client(self.run.uri)
        state = BridgeState.read(self.run.work)
        if state is not None and state.run_id is not None and not client.is_run(state.run_id, state.key):
            log.info("MLflow does not have the run %s any more; starting another", state.run_id)
            state = None
        self._state = state or BridgeState(secrets.token_hex(16))
        self._save()
        if self._state.run_id is None:
            self._save(run_id=client.find_or_create_run(*self._description(), self._tags()))
        assert self._state.run_id is not None
        client.log_config(self._state.run_id, self.run.config)
        if self._state.status != "RUNNING":
            for run_id in self._run_ids():
                client.set_status(run_id, "RUNNING")
            self._save(status="RUNNING")
        self.run_id = self._state.run_id
        self._trajectory, self._bytes_read, self._lines_read = Trajectory(), 0, 0
        self._client = client
        return client

    def _bring_points(self, client: Client) -> None:
        pending: list[BranchPoint] = []
        for record in self._new_records():
            self._lines_read += 1
            point = self._trajectory.take(record)
            if self._lines_read <= self._state.lines_written:
                continue
            if point is not None:
                pending.append(point)
            if len(pending) >= LINES_PER_SAVE:
                self._log(client, pending)
                pending = []
        self._log(client, pending)

    def _log(self, client: Client, points: list[BranchPoint]) -> None:
        for branch, group in groupby(points, key=lambda point: point.branch):
            client.log_points(self._branch_run(client, branch), [point.point for point in group])
        if self._lines_read > self._state.lines_written:
            self._save(lines_written=self._lines_read)

    def _branch_run(self, client: Client, branch: int) -> str:
        while len(self._state.branches) < branch:
            number = len(self._state.branches) + 1
            experiment, name, key = self._description()
            tags = {**self._tags(), "mlflow.parentRunId": self._run_ids()[0], "branch": str(number)}
            log.warning("the resume of %s went another way than before; MLflow shows it as branch %d", name, number)
            run_id = client.find_or_create_run(experiment, f"{name} branch {number}", f"{key}.{number}", tags)
            self._save(branches=(*self._state.branches, run_id))
        return self._run_ids()[branch]

    def _new_records(self) -> Iterator[dict[str, Any]]:
        """Records of the whole lines after those read before."""
        with open(self.run.journal, "rb") as file:
            file.seek(self._bytes_read)
            whole = file.read().rpartition(b"\n")[0:2]
        raw = b"".join(whole)
        self._bytes_read += len(raw)
        return iter(list(parse_lines(raw.split(b"\n")[:-1], self.run.journal, self._lines_read + 1)))

    def _description(self) -> tuple[str, str, str]:
        return self.run.config_dir.name, f"{self.run.stage}/{self.run.name}".rstrip("/"), self._state.key

    def _tags(self) -> dict[str, str]:
        run = self.run
        tags = {
            "stage": run.stage,
            "name": run.name,
            "fingerprint": run.fingerprint,
            "run_dir": run.run_dir.name
            if run.config_dir == run.run_dir.parent
            else str(run.run_dir.relative_to(run.config_dir)),
            "mlflow.source.name": f"implicit-llm {run.stage}",
            "mlflow.source.type": "JOB",
        }
        if run.commit:
            tags["mlflow.source.git.commit"] = run.commit
        return tags | {f"upstream.{role}": run_id for role, run_id in run.upstream.items() if run_id}

    def _run_ids(self) -> list[str]:
        assert self._state.run_id is not None
        return [self._state.run_id, *self._state.branches]

    def _save(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        write_atomic(self.run.work / STATE, json.dumps(asdict(self._state), indent=1) + "\n")


def is_complete(run: TrackedRun) -> bool:
    """Whether the whole journal of a finished run was brought."""
    state = BridgeState.read(run.work)
    if state is None or state.status != "FINISHED":
        return False
    try:
        return state.lines_written >= run.journal.read_bytes().count(b"\n")
    except OSError:
        return True
