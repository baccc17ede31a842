"""Questions to Slurm: how jobs are doing, all in one question."""

import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

QUESTION_TIMEOUT_S = 60
LONGEST_PAUSE_S = 600
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE"),
    *("OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
}


class NoAnswer(Exception):
    """Slurm's command failed: nothing is known about any job."""


class SlurmState(NamedTuple):
    """`state`: in PENDING, RUNNING or ENDED; `exit_code`: of the batch script; `nodes`: in Slurm's notation."""

    state: str
    exit_code: str = ""
    nodes: str = ""
    reason: str = ""

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED


class SlurmQueue:
    """`clock` in seconds, for tests; after a failed question the pause before the next one doubles."""

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
        """The states of those jobs that Slurm knows; a job in state UNKNOWN or the like counts as not known.

        Raises: NoAnswer.
        """
        ids = sorted(set(job_ids))
        pause_s, self._pause_s = self._pause_s, self.interval_s
        try:
            return self._ask(ids)
        except NoAnswer as error:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            self.log.warning(f"{error}; asked again in {self._pause_s:.0f} s")
            raise
        finally:
            self._next = self._clock() + self._pause_s

    def _ask(self, ids: list[str]) -> dict[str, SlurmState]:
        """One squeue; sacct only for jobs that squeue has forgotten, minutes after their end."""
        try:
            current = _squeue(ids)
        except NoAnswer:
            # between an end and a requeue the accounting shows the end, so only jobs that still run are believed
            recorded = {job_id: state for job_id, state in self._sacct(ids).items() if not state.is_ended}
            if not recorded:
                raise
            return recorded
        missing = [job_id for job_id in ids if job_id not in current]
        return current | (self._sacct(missing) if missing else {})

    def _sacct(self, ids: list[str]) -> dict[str, SlurmState]:
        if not self._has_accounting:
            return {}
        try:
            return _states(ids, ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,NodeList"])
        except NoAnswer as error:
            if "disabled" in str(error):
                self._has_accounting = False
                self.log.info("this cluster has no accounting; squeue forgets jobs minutes after their end")
            else:
                self.log.warning(str(error))
            return {}


def _squeue(ids: list[str]) -> dict[str, SlurmState]:
    try:
        return _states(ids, ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T||%N|%r"])
    except NoAnswer as error:
        if "Invalid job id" in str(error):  # of every job: forgotten some minutes after its end
            return {}
        raise


def _states(ids: Sequence[str], command: Sequence[str]) -> dict[str, SlurmState]:
    """The answer to a question about jobs, some of which may be tasks of an array."""
    arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in ids}))
    found: dict[str, SlurmState] = {}
    for line in ask_slurm([*command, "-j", arrays]).splitlines():
        shown, state, exit_code, nodes, reason = [*line.split("|"), "", "", "", ""][:5]
        word = state.partition(" ")[0]  # "CANCELLED by 0" is CANCELLED
        if word in PENDING | RUNNING | ENDED:
            state_of = SlurmState(word, exit_code, "" if nodes == "None assigned" else nodes, reason)
            found |= dict.fromkeys(_expand(shown), state_of)
    return {job_id: found[job_id] for job_id in ids if job_id in found}


def _expand(shown: str) -> list[str]:
    """The ids in "12", "12_3" or, for the pending tasks of an array, "12_[0-2,5%4]"."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", shown)
    if match is None:
        return [shown]
    ranges = (part.partition("-") for part in match[2].split(","))
    return [f"{match[1]}_{i}" for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]


def find_by_name(name: str, since_unix_s: float, tries: int = 3, pause_s: float = 2.0) -> str | None:
    """The id of the job, or of the array, with this name; None if Slurm has none.

    Raises: NoAnswer.
    """
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 3600))
    for last in reversed(range(tries)):
        answer = ask_slurm(["squeue", "-h", "-t", "all", "-o", "%F|%j", "--name", name])
        if not answer.strip():
            with suppress(NoAnswer):
                answer = ask_slurm(["sacct", "-X", "-n", "-P", "-o", "JobID,JobName%200", "--name", name, "-S", start])
        for line in answer.splitlines():
            job_id, _, found = line.partition("|")
            if found == name:
                return job_id.partition("_")[0]
        if last:
            time.sleep(pause_s)
    return None


def ask_slurm(command: Sequence[str]) -> str:
    """The output of one of Slurm's commands. Raises: NoAnswer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUESTION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NoAnswer(f"{command[0]} failed with exit code {done.returncode}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout
