"""Record how a result was produced: times, hosts, commit, versions and command. Equal results may differ in these."""

import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.values import COMMIT
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.journal import read_records
from implicit_llm_contracts.runs.places import PROJECT_DIR

PACKAGES = (
    "implicit-llm", "torch", "transformers", "accelerate", "safetensors", "numpy", "datasets", "lm-eval", "mlflow",
    "snakemake", "submitit", "triton", "mamba-ssm", "causal-conv1d",
)  # fmt: skip
# Events in the journal for problems that a later step or attempt corrected.
INCIDENTS = ("stage_failed", "checkpoint_corrupt", "checkpoint_failed", "kept_checkpoint_lost")
COMMIT_VARIABLE = "IMPLICIT_LLM_COMMIT"
SLURM = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_PARTITION", "JOB_NODELIST", "RESTART_COUNT")


def write(path: Path, fingerprint: str, journal: Path) -> None:
    """Write the facts about this process and, from the journal, about all attempts and incidents to `path`.

    Raises: JournalError, StorageError; UserError for a wrong commit in COMMIT_VARIABLE.
    """
    now = datetime.now(UTC)
    about = {
        "fingerprint": fingerprint,
        "attempts": attempts(journal, now),
        "incidents": [record for record in read_records(journal) if record.get("name") in INCIDENTS],
        "finished": now.isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": device(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "git": git_state(),
        "python": platform.python_version(),
        "versions": versions(),
        "argv": sys.argv,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "slurm": {name.lower(): os.environ[f"SLURM_{name}"] for name in SLURM if f"SLURM_{name}" in os.environ},
    }
    faults.point("provenance.before_write")
    write_json(path, about)


def attempts(journal: Path, now: datetime) -> list[dict[str, Any]]:
    """Return each attempt: the time and host of its start, and the seconds until its last record in the journal.

    The last attempt is the current one, which lasts until `now`.
    """
    found: list[dict[str, Any]] = []
    for record in read_records(journal):
        if record.get("name") == "stage_started":
            found.append({"started": record["time"], "host": record.get("host"), "busy_s": 0.0})
        elif found:
            found[-1]["busy_s"] = _seconds(found[-1]["started"], datetime.fromisoformat(record["time"]))
    if found:
        found[-1]["busy_s"] = _seconds(found[-1]["started"], now)
    return found


def _seconds(started: str, end: datetime) -> float:
    return round((end - datetime.fromisoformat(started)).total_seconds(), 3)


def git_state() -> dict[str, Any] | None:
    """Return the commit of the source tree and whether tracked files have changed, or None if the commit is unknown.

    If git does not know the commit, as in a copy of the tree, the environment variable COMMIT_VARIABLE may name it.
    `is_dirty` is None if it is unknown.
    Raises: UserError if the variable's value is not a commit.
    """
    commit = _git("rev-parse", "HEAD") if (PROJECT_DIR / ".git").exists() else None
    if commit is not None:
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}
    told = os.environ.get(COMMIT_VARIABLE)
    if told is not None and not COMMIT.accepts(told):
        raise UserError(f"{COMMIT_VARIABLE}: {told!r} is no commit; give what `git rev-parse HEAD` prints, or unset it")
    return None if told is None else {"commit": told, "is_dirty": None}


def device() -> str:
    """Return the name of torch's current GPU; "cpu" without a GPU, or if torch is not imported."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of those PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PROJECT_DIR), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
