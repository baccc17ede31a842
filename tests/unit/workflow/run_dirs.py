"""Run directories as jobs leave them, written by hand."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow.planning.plan import Plan
from tests.unit.workflow.experiments import ExperimentFile

START_S = 1_700_000_000.0  # seconds since 1970, in November 2023


def real_plan(experiment: ExperimentFile) -> Plan:
    """The plan with the code digests of now, as the commands make it."""
    return Plan(experiment.load(), experiment.path.parent / "results")


def work_of(plan: Plan, key: str) -> Path:
    """The work directory of the wanted result, made if it is not there."""
    fingerprint = plan.identities[key].fingerprint
    work = plan.run_dir(plan.nodes[key]) / "work" / fingerprint[:FINGERPRINT_DIGITS]
    work.mkdir(parents=True, exist_ok=True)
    return work


def at(seconds: float) -> str:
    """A time of the journal, so many seconds after the first."""
    return datetime.fromtimestamp(START_S + seconds, UTC).isoformat(timespec="milliseconds")


def event(name: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "name": name, "time": at(seconds), **fields}


def metrics(step: int, seconds: float, **values: float | None) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time": at(seconds), "values": values}


def write_journal(plan: Plan, key: str, *records: Mapping[str, Any], torn: str = "") -> Path:
    """Append the records, and the beginning of another one."""
    path = work_of(plan, key) / "journal.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(record)}\n" for record in records) + torn)
    return path


def finish_with(plan: Plan, key: str, summary: Mapping[str, Any]) -> None:
    """A finished job, in its work directory too."""
    wanted, run_dir = plan.identities[key], plan.run_dir(plan.nodes[key])
    for folder in (work_of(plan, key), run_dir):
        (folder / "manifest.json").write_bytes(Manifest.of(wanted, (), summary).to_bytes())


def log(plan: Plan, key: str, *lines: str) -> Path:
    path = plan.run_dir(plan.nodes[key]) / "job.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"2026-01-01T00:00:00Z {line}\n" for line in lines))
    return path


_HOLD = """
import fcntl, os, socket, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(sys.argv[2].format(pid=os.getpid(), host=socket.gethostname()))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""
JOB, DRIVER = "process {pid} on {host}\n", "{pid}\n"


@contextmanager
def held(path: Path, text: str = JOB) -> Iterator[int]:
    """Another process holds the lock file meanwhile; gives its pid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _HOLD, os.fspath(path), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()
