"""Query Slurm: the states of jobs, whether it accepts a partition and account, and the time limits."""

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.store import SLURM_CLASSES

QUESTION_TIMEOUT_S = 60
LONGEST_PAUSE_S = 600
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
ENDED = {"COMPLETED", "FAILED", *SLURM_CLASSES}
# Variables with these prefixes change what Slurm's commands do and print, so the commands get only those in KEPT. With
# all of them, a driver that is itself a job would pass on its own allocation, and a filter of squeue would hide jobs.
CHANGING = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_")
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION"}


class NoAnswer(Exception):
    """A command of Slurm failed or printed no usable answer, so the state of its jobs is unknown."""


class SlurmState(NamedTuple):
    """The state of a job in Slurm.

    state: in PENDING, RUNNING or ENDED; "UNKNOWN" if Slurm does not know the job; "" without an answer. exit_code: the
    exit code of the batch script; only sacct reports it. nodes: in Slurm's notation. reason: why the job waits or
    failed; only squeue reports it.
    """

    state: str
    exit_code: str = ""
    nodes: str = ""
    reason: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in PENDING | RUNNING

    @property
    def is_refused(self) -> bool:
        """Whether Slurm refused the job because no node can run it, at once (then sbatch failed) or later."""
        return self.state == "FAILED" and self.reason == "BadConstraints" and not self.nodes

    @property
    def is_over(self) -> bool:
        """Whether the job has ended or Slurm does not know it; without an answer it may still run."""
        return self.state in {*ENDED, UNKNOWN.state}


UNKNOWN, NO_ANSWER = SlurmState("UNKNOWN"), SlurmState("")


class SlurmQueue:
    """The queue of Slurm, queried for the states of jobs; after a failed query, the pause before the next one doubles.

    clock: returns seconds, and can be replaced in tests.
    """

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
        """Return the state of each job: UNKNOWN if Slurm does not know it, NO_ANSWER after a failed query.

        A failed query is logged as a warning.
        """
        ids = list(job_ids)
        pause_s, self._pause_s = self._pause_s, self.interval_s
        try:
            return dict.fromkeys(ids, UNKNOWN) | self._ask(ids)
        except NoAnswer as error:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            self.log.warning(f"{error}; asked again in {self._pause_s:.0f} s")
            return dict.fromkeys(ids, NO_ANSWER)
        finally:
            self._next = self._clock() + self._pause_s

    def _ask(self, ids: list[str]) -> dict[str, SlurmState]:
        """Run squeue once, and sacct for the jobs that squeue has forgotten, or for all jobs if squeue fails.

        Raises: NoAnswer.
        """
        try:
            current = _states(ids, ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T||%N|%r"])
        except NoAnswer as error:
            if "Invalid job id" in str(error):  # all jobs are forgotten, some minutes after their end
                return self._sacct(ids)
            # Between an end and a requeue, accounting shows the end. Use its answers only for jobs that still run.
            recorded = {job_id: state for job_id, state in self._sacct(ids).items() if state.is_alive}
            if not recorded:
                raise
            return dict.fromkeys(ids, NO_ANSWER) | recorded
        missing = [job_id for job_id in ids if job_id not in current]
        return current | (self._sacct(missing) if missing else {})

    def _sacct(self, ids: list[str]) -> dict[str, SlurmState]:
        if not self._has_accounting:
            return {}
        try:
            return _states(ids, ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,NodeList"])
        except NoAnswer as error:
            self._has_accounting = "disabled" not in str(error)
            self.log.warning(f"{error}; squeue forgets jobs minutes after their end")
            return {}


def _states(ids: Sequence[str], command: Sequence[str]) -> dict[str, SlurmState]:
    """Run `command` for these jobs and return the states that it prints, by id. Raises: NoAnswer."""
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
    """Return the ids in "12", "12_3" or, for the pending tasks of an array, "12_[0-2,5%4]"."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", shown)
    if match is None:
        return [shown]
    ranges = (part.partition("-") for part in match[2].split(","))
    return [f"{match[1]}_{i}" for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]


def find_by_name(name: str, tries: int = 3, pause_s: float = 2.0) -> str | None:
    """Return the id of the job, or of the array, with this name; query Slurm up to `tries` times until it is found.

    Return None if the job ended minutes ago, does not exist, or was refused: Slurm then has a record of a failed job
    that never had a node. Raises: NoAnswer.
    """
    for last in reversed(range(tries)):
        for line in ask_slurm(["squeue", "-h", "-t", "all", "-o", "%F|%T|%r|%N|%j", "--name", name]).splitlines():
            job_id, state, reason, nodes, found = line.split("|", 4)
            if found == name:
                return None if SlurmState(state, "", nodes, reason).is_refused else job_id
        if last:
            time.sleep(pause_s)
    return None


def ask_slurm(command: Sequence[str], timeout_s: float = QUESTION_TIMEOUT_S) -> str:
    """Return the output of a Slurm command. Raises: NoAnswer."""
    env = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(CHANGING)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout).split())
        raise NoAnswer(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout


def ignored_variables() -> list[str]:
    """Return the names of the user's SBATCH_* variables that have no effect, which are all except those in KEPT."""
    return sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in KEPT)


PLACE = ("partition", "account", "qos", "constraint")
PARTITIONS = ("sinfo", "--noheader", "--format", "%R")
TIME_LIMITS = ("sinfo", "--all", "--noheader", "--format", "%P|%l")


def check_place(request: Mapping[str, Any]) -> None:
    """Let Slurm check partition, account, qos and constraint without submitting anything.

    Raises: WorkflowError with Slurm's refusal in one line.
    """
    place = [f"--{name}={request[name]}" for name in PLACE if request.get(name)]
    if not place:
        return
    try:
        ask_slurm(["sbatch", "--test-only", "--time=1", *place, "--wrap=true"])
    except NoAnswer as error:  # if Slurm itself fails, the submission will show it
        if re.search(r"invalid|not permitted|denied|unknown|not exist", str(error), re.IGNORECASE):
            names = ""
            with suppress(NoAnswer):
                names = f"; partitions: {', '.join(ask_slurm(PARTITIONS).split())}"
            raise WorkflowError(f"Slurm refuses {' '.join(place)}: {error}{names}") from error


def time_limits() -> dict[str, int]:
    """Return the time limit (minutes) of each partition that has one; "" is the default partition. Raises: NoAnswer."""
    limits: dict[str, int] = {}
    for line in ask_slurm(TIME_LIMITS).splitlines():
        name, _, text = line.partition("|")
        if match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):\d+", text.strip()):
            days, hours, minutes = (int(found or 0) for found in match.groups())
            limits[name.rstrip("*")] = minutes + 60 * (hours + 24 * days)
            if name.endswith("*"):
                limits[""] = limits[name.rstrip("*")]
    return limits


def signals_steps_first() -> bool:
    """Return whether a preemption first signals, by SIGTERM, only the steps of srun.

    The batch script then gets a signal only after the grace time. The result is False if preemption is off, or if Slurm
    is configured to send the signal of --signal at a preemption (`send_user_signal`). Raises: NoAnswer.
    """
    config = ask_slurm(("scontrol", "show", "config"))
    return "preempt/none" not in config and "send_user_signal" not in config
