"""Why a job failed, in one word, and what is done about it: one rule for each class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREEMPTED_EXIT = 75  # EX_TEMPFAIL: the job asks to be started again
USER_EXIT = 2
ENV_EXIT = 96  # of our own script, when the set-up of the environment fails

# How often the executor starts a job of this class once more.
RETRIES = {
    "preempted": None,  # as often as the requeue limit allows
    "timeout": 0,
    "oom": 1,  # with more memory
    "node_fail": 1,  # on other nodes
    "lost": 1,  # on other nodes
    "hang": 0,
    "non_finite": 0,
    "env": 0,
    "quota": 0,
    "user": 0,
    "bug": 0,
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
_OUT_OF_MEMORY = re.compile(r"exceeded memory limit|oom[-_ ]kill|out of memory", re.IGNORECASE)
_COMMAND_EXIT = re.compile(r"returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>")

NEXT = {
    "preempted": "start the workflow again, or raise --submitit-requeue-limit",
    "timeout": "raise the resource 'runtime', or write checkpoints more often",
    "oom": "raise the resource 'mem_mb' (it also holds Snakemake, about 200 MB) or use smaller batches",
    "node_fail": "tell the administrators of the cluster",
    "lost": "look for the job with `sacct`, then start the workflow again",
    "hang": "look at the stacks in the log",
    "non_finite": "look at the log; the last good checkpoint is kept",
    "env": "put the environment of the node right",
    "quota": "free some space",
    "user": "see the message",
    "bug": "see the log",
}


@dataclass(frozen=True)
class Failure:
    """`state`, `exit_code`: as Slurm and the job's command report them, "" and None where they do not."""

    kind: str
    message: str
    state: str = ""
    exit_code: int | None = None
    nodes: str = ""


def exit_code_of_command(output: str) -> int | None:
    """The exit code of the rule's command, from what the Snakemake in the job printed of it last; it has its own."""
    found = None
    for found in _COMMAND_EXIT.finditer(output):  # noqa: B007
        pass
    if found is None:
        return None
    return int(found[1]) if found[1] else 128 + int(found[2])


def class_of_exit(exit_code: int | None, stated: object) -> str:
    """The class of a job whose command ended by itself. `stated`: what the job says in its status file."""
    if isinstance(stated, str) and stated in RETRIES:
        return stated
    if exit_code == PREEMPTED_EXIT:
        return "preempted"
    if exit_code == USER_EXIT:
        return "user"
    if exit_code == ENV_EXIT:
        return "env"
    if exit_code == 128 + 9:
        return "node_fail"  # somebody killed it, and it was not this job's own doing
    return "bug"


def class_of_state(state: str, stderr: str) -> str:
    """The class of a job that ended without a word of its own, from Slurm's state of it and submitit's stderr."""
    if state not in ("CANCELLED", "PREEMPTED") and _OUT_OF_MEMORY.search(stderr):
        return "oom"
    return SLURM_CLASSES.get(state, "lost")


def is_provisional(outcome: Mapping[str, Any]) -> bool:
    """Whether Slurm knows better: after SIGTERM it may requeue the job, or somebody has cancelled it."""
    return outcome.get("asked") == "SIGTERM" and outcome.get("failure_class") in ("preempted", "timeout")
