"""What Slurm knows of many jobs, in one question each time."""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

QUESTION_TIMEOUT_S = 60
LONGEST_PAUSE_S = 600
ACTIVE = {
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "BOOT_FAIL",
    "PREEMPTED",
    "REVOKED",
}


class NoAnswer(Exception):
    """Slurm's command failed: nothing is known of any job."""


@dataclass(frozen=True)
class SlurmState:
    """`state`: one of ACTIVE or ENDED; `exit_code`: of the batch script; `nodes`: as Slurm writes a list of them."""

    state: str
    exit_code: str = ""
    nodes: str = ""
    reason: str = ""

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED


class SlurmQueue:
    """`clock` in seconds, for tests; a failed question is not repeated for a while, twice as long each time."""

    def __init__(self, interval_s: float, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log
        self.interval_s = interval_s
        self._clock = clock
        self._has_accounting = True
        self._pause_s = interval_s
        self._next = float("-inf")

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def ask(self, job_ids: Iterable[str]) -> dict[str, SlurmState]:
        """The states of those jobs that Slurm knows; UNKNOWN and the like is as if it did not know them.

        Raises: NoAnswer, with a longer pause before the next question.
        """
        ids = sorted(set(job_ids))
        try:
            found = self._ask(ids)
        except NoAnswer as error:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self._next = self._clock() + self._pause_s
            self.log.warning(f"{error}; asked again in {self._pause_s:.0f} s")
            raise
        self._pause_s = self.interval_s
        self._next = self._clock() + self._pause_s
        return found

    def _ask(self, ids: list[str]) -> dict[str, SlurmState]:
        """One squeue; sacct only for those that it has forgotten, minutes after their end."""
        try:
            current = self._current(ids)
        except NoAnswer:
            # between an end and a requeue the accounting shows the end, so only what still runs is believed
            recorded = {job_id: state for job_id, state in self._accounting(ids).items() if not state.is_ended}
            if not recorded:
                raise
            return recorded
        missing = [job_id for job_id in ids if job_id not in current]
        return current | (self._accounting(missing) if missing else {})

    def _accounting(self, ids: list[str]) -> dict[str, SlurmState]:
        if not self._has_accounting:
            return {}
        command = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,NodeList", "-j", ",".join(_main_ids(ids))]
        try:
            answer = ask_slurm(command)
        except NoAnswer as error:
            if "disabled" in str(error):
                self._has_accounting = False
                self.log.info("this cluster has no accounting; squeue forgets jobs minutes after their end")
            else:
                self.log.warning(str(error))
            return {}
        return _select(ids, (line.split("|") for line in answer.splitlines()))

    def _current(self, ids: list[str]) -> dict[str, SlurmState]:
        command = ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T||%N|%r", "-j", ",".join(_main_ids(ids))]
        try:
            answer = ask_slurm(command)
        except NoAnswer as error:
            if "Invalid job id" in str(error):  # none of them: forgotten some minutes after their end
                return {}
            raise
        return _select(ids, (line.split("|") for line in answer.splitlines()))


def find_by_name(name: str, since_unix_s: float, tries: int = 3, pause_s: float = 2.0) -> str | None:
    """The id of the job (of the array) with this name, or None when Slurm has none.

    Raises: NoAnswer when Slurm cannot be asked.
    """
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 3600))
    for last in reversed(range(tries)):
        answer = ask_slurm(["squeue", "-h", "-t", "all", "-o", "%F|%j", "--name", name])
        if not answer.strip():
            try:
                answer = ask_slurm(["sacct", "-X", "-n", "-P", "-o", "JobID,JobName%200", "--name", name, "-S", start])
            except NoAnswer:
                answer = ""
        for line in answer.splitlines():
            job_id, _, found = line.partition("|")
            if found == name:
                return job_id.partition("_")[0]
        if last:
            time.sleep(pause_s)
    return None


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel the jobs, pending or running. Raises: NoAnswer."""
    ids = sorted(set(job_ids))
    if ids:
        ask_slurm(["scancel", *ids])


def ask_slurm(command: Sequence[str]) -> str:
    """What one of Slurm's commands prints. Raises: NoAnswer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUESTION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NoAnswer(f"{command[0]} failed with exit code {done.returncode}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def _main_ids(ids: Iterable[str]) -> list[str]:
    return sorted({job_id.partition("_")[0] for job_id in ids})


def _select(ids: list[str], rows: Iterable[list[str]]) -> dict[str, SlurmState]:
    wanted, found = set(ids), {}
    for row in rows:
        shown, state, exit_code, nodes, *rest = [*row, "", "", ""]
        words = state.split()
        if not words or words[0] not in ACTIVE | ENDED:  # "CANCELLED by 0" is CANCELLED
            continue
        for job_id in _expand(shown):
            if job_id in wanted:
                found[job_id] = SlurmState(words[0], exit_code, "" if nodes == "None assigned" else nodes, rest[0])
    return found


def _expand(shown: str) -> list[str]:
    """The ids in "12", "12_3" or, for the pending tasks of an array, "12_[0-2,5%4]"."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", shown)
    if match is None:
        return [shown]
    ids = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        ids += [f"{match[1]}_{index}" for index in range(int(first), int(last or first) + 1)]
    return ids
