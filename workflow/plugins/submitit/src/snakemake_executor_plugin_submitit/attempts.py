"""What is known about a job's attempts: how each one ended, the class of a failure, and whether to try again."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

PREEMPTED_EXIT = 75  # EX_TEMPFAIL: the job asks to be started again
USER_EXIT = 2
ENV_EXIT = 96  # from our own script, when the setup of the environment fails
SIGNAL_EARLY_S = 60  # Slurm sends the signal of --signal up to a minute early
UNFRUITFUL_LIMIT = 2  # attempts in a row up to the time limit without progress

Attempt = tuple[dict[str, Any], dict[str, Any] | None]  # start and end; no end: it was killed or still runs


class FailureClass(NamedTuple):
    """`retries`: how often the executor submits the job again, None: up to the requeue limit; `advice`: to the user."""

    retries: int | None
    advice: str


CLASSES = {
    "preempted": FailureClass(None, "start the workflow again, or raise --submitit-requeue-limit"),
    "timeout": FailureClass(0, "raise the resource 'runtime', or write checkpoints more often"),
    "oom": FailureClass(  # again with more memory
        1, "raise the resource 'mem_mb' (it includes Snakemake itself, about 200 MB) or use smaller batches"
    ),
    "node_fail": FailureClass(1, "report the node to the administrators of the cluster"),  # again on other nodes
    "lost": FailureClass(1, "look for the job with `sacct`, then start the workflow again"),  # again on other nodes
    "hang": FailureClass(0, "look at the stacks in the log"),
    "non_finite": FailureClass(0, "look at the log; the last good checkpoint is kept"),
    "env": FailureClass(0, "fix the environment of the node"),
    "quota": FailureClass(0, "free some space"),
    "user": FailureClass(0, "see the message"),
    "bug": FailureClass(0, "see the log"),
}
ELSEWHERE = ("node_fail", "lost")
MORE_MEMORY = 1.5

SLURM_CLASSES = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "CANCELLED": "user",
    "REVOKED": "user",
}
# 137: another process killed it, and the job itself did nothing wrong
_EXIT_CLASSES = {PREEMPTED_EXIT: "preempted", USER_EXIT: "user", ENV_EXIT: "env", 128 + 9: "node_fail"}
_OUT_OF_MEMORY = re.compile(r"exceeded memory limit|oom[-_ ]kill|out of memory", re.IGNORECASE)
_COMMAND_EXIT = re.compile(r"returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>")


class End(NamedTuple):
    """How a submission ended. `kind`: the class of its failure, None for success; `state`, `exit_code`: from Slurm and
    the job's command, "" and None if unknown."""

    kind: str | None
    message: str = ""
    state: str = ""
    exit_code: int | None = None
    nodes: str = ""


def add(path: Path, event: Literal["start", "end"], **facts: Any) -> dict[str, Any]:
    """Append to a job's attempts and return it.

    Both have `attempt` and `unix_s`, and `progress` as the job stated it.
    A start: `submission`, `job_id`, `host`, `nodes`, `pid` of the job's first process, and `waited_s` since the
    submission or the end of the last attempt.
    An end: `exit_code` of the job's command, `asked`, the signal that asked it to stop or None, `seconds`,
    `is_time_limit`, and `used`, see usage.py.
    """
    written = {"event": event, **facts}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(written, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return written


def read(*paths: Path) -> list[Attempt]:
    """The attempts in the files. Lines that a crash cut off are skipped."""
    found: list[Attempt] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] == "start":
                found.append((event, None))
            elif found:
                found[-1] = (found[-1][0], event)
    return found


def unfruitful(attempts: list[Attempt], progress: Any) -> int:
    """How many of the last attempts in a row ran to their time limit without progress.

    An attempt without an end was killed. `progress` is the job's current one; a job that states none is not counted.
    """
    if progress is None:
        return 0
    count, after = 0, progress
    for start, end in reversed(attempts):
        if after != start["progress"] or (end is not None and not end["is_time_limit"]):
            break
        count, after = count + 1, start["progress"]
    return count


def exit_code_of_command(output: str) -> int | None:
    """The exit code of the rule's command, from the last error that the Snakemake in the job printed."""
    found = _COMMAND_EXIT.findall(output)
    if not found:
        return None
    code, signal = found[-1]
    return int(code) if code else 128 + int(signal)


def class_of_exit(exit_code: int, stated: object) -> str:
    """The class of a job whose command ended by itself; `stated`: what the job says in its status file."""
    return stated if isinstance(stated, str) and stated in CLASSES else _EXIT_CLASSES.get(exit_code, "bug")


def class_of_state(state: str, stderr: str) -> str:
    """The class of a job that left no outcome, from its state in Slurm and submitit's stderr."""
    if state not in ("CANCELLED", "PREEMPTED") and _OUT_OF_MEMORY.search(stderr):
        return "oom"
    return SLURM_CLASSES.get(state, "lost")


def is_provisional(outcome: Mapping[str, Any]) -> bool:
    """Whether Slurm decides: after SIGTERM it may requeue the job, or the user has cancelled it."""
    return outcome.get("asked") == "SIGTERM" and outcome.get("failure_class") in ("preempted", "timeout")
