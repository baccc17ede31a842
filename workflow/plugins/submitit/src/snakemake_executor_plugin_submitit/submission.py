"""Submitting through submitit, so that a job does not need its driver any more once sbatch has accepted it.

The pickles are written and read by this plugin only, in a folder that nobody else may enter; it unpickles nothing else.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import start_controller

from snakemake_executor_plugin_submitit.processes import start_ticks
from snakemake_executor_plugin_submitit.slurm_queue import NoAnswer
from snakemake_executor_plugin_submitit.step import JobStep

SBATCH_TIMEOUT_S = 120
# Of sbatch: the controller was not reached or is busy. The job may have been accepted nevertheless.
TRANSIENT = (
    "timed out",
    "unable to contact",
    "temporarily",
    "connection refused",
    "try again",
    "communication",
    "resending",
)
SCRIPT = "submission.sh"
ENTRY = "snakemake_executor_plugin_submitit.entry"
UNLIMITED = 10**6  # submitit's own limit of time-outs: the step has a better rule


class SubmissionError(Exception):
    """sbatch has refused, or its answer is not known; `is_transient`: it may accept the next time."""

    def __init__(self, message: str, is_transient: bool) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(frozen=True)
class Submitted:
    """`job_id`: of Slurm (of the array, for an array), or the pid of the local controller."""

    job_id: str
    started: int | None = None
    process: subprocess.Popen[bytes] | None = None


def pickle_path(folder: Path, task: int) -> Path:
    return folder / f"task_{task}.pkl"


def write_steps(folder: Path, steps: Sequence[JobStep], limit_min: float) -> None:
    """Pickle the steps where `entry` finds them: unlike submitit, before the job can start, and without its id."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for task, step in enumerate(steps):
        delayed = DelayedSubmission(step)
        delayed.set_timeout(limit_min, UNLIMITED)  # type: ignore[arg-type]
        delayed.dump(pickle_path(folder, task))


def write_script(folder: Path, request: Mapping[str, Any], count: int) -> None:
    """Write what sbatch gets: for `count` steps, an array if more than one.

    The job is the batch script itself: so it gets the signals, and Slurm's controller is not asked for a step. Only
    where the signal is not for the batch script does srun start it.
    """
    paths = task_paths(folder, "%A_%a" if count > 1 else "%j")
    options = {**request, "output": paths.stdout, "error": paths.stderr, "open-mode": "append"}
    if count > 1:
        options["array"] = f"0-{count - 1}"
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in sorted(options.items())
    ]
    srun = [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={request['cpus-per-task']}",
        "--overlap",
        "--unbuffered",
    ]
    is_batch = str(request["signal"]).startswith("B:")
    command = ["exec", *([] if is_batch else srun), sys.executable, "-u", "-m", ENTRY, str(folder)]
    lines = ["#!/bin/bash", *lines, "trap '' USR2", "export SUBMITIT_EXECUTOR=slurm", shlex.join(command), ""]
    (folder / SCRIPT).write_text("\n".join(lines), encoding="utf-8")


def submit_to_slurm(
    folder: Path, find: Callable[[], str | None], pauses_s: Sequence[float] = (2, 5, 15, 60, 120)
) -> Submitted:
    """Have sbatch accept the script, once.

    `find` looks for the job by its name, since sbatch may report an error although the job was accepted, and raises
    NoAnswer when Slurm cannot be asked: then sbatch is not called again.
    Raises: SubmissionError.
    """
    error = SubmissionError("sbatch was not called", is_transient=True)
    is_to_call = True
    for pause_s in (*pauses_s, 0):
        if is_to_call:
            try:
                return Submitted(_sbatch(folder / SCRIPT))
            except SubmissionError as refusal:
                error = refusal
        try:
            found = find()
        except NoAnswer as silence:
            is_to_call = False
            error = SubmissionError(f"{error}; whether it was accepted is not known ({silence})", is_transient=True)
        else:
            if found is not None:
                return Submitted(found)
            is_to_call = True
            if not error.is_transient:
                raise error
        time.sleep(pause_s)
    raise error


def _sbatch(path: Path) -> str:
    # A driver that is itself a job must not hand its own allocation on; SLURM_CONF says which cluster.
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    command = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SubmissionError(f"sbatch gave no answer within {SBATCH_TIMEOUT_S} s", is_transient=True) from error
    except OSError as error:
        raise SubmissionError(f"sbatch cannot be started: {error}", is_transient=False) from error
    lines = done.stdout.strip().splitlines()
    job_id = lines[-1].partition(";")[0] if lines else ""
    if done.returncode == 0 and job_id.isdigit():
        return job_id
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    is_transient = any(text in said.lower() for text in TRANSIENT)
    raise SubmissionError(f"sbatch failed with exit code {done.returncode}: {said}", is_transient)


def submit_locally(folder: Path, limit_min: int, delay_s: int, gpus: Sequence[int]) -> Submitted:
    """Start submitit's controller of one step, written to `folder` before."""
    process = start_controller(
        folder,
        shlex.join([sys.executable, "-u", "-m", ENTRY, str(folder)]),
        cuda_devices=",".join(map(str, gpus)),
        timeout_min=limit_min,
        signal_delay_s=delay_s,
    )
    return Submitted(str(process.pid), start_ticks(process.pid), process)


def task_paths(folder: Path, job_id: str) -> JobPaths:
    """Submitit's files of a job; `job_id` as 12, or 12_3 for a task of an array."""
    return JobPaths(folder, job_id=job_id, task_id=0)


def unique_folder(parent: Path) -> Path:
    return parent / uuid.uuid4().hex
