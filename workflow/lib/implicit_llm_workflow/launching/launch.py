"""Training in several processes: torchrun on one node, srun and torchrun on several.

The launcher is the job's own process, to which stop signals are sent. It hands them on, waits, and ends with the exit
code and the class of the process that was the reason for the end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from implicit_llm_contracts.runs import launched
from implicit_llm_contracts.runs.launched import LaunchFolder
from implicit_llm_workflow.launching.agents import (
    AGENTS,
    LaunchError,
    NodeJob,
    StopSignals,
    shown_slurm_variables,
    supervise,
    wait,
)

# Of the step that srun would start in, not of the one that it starts.
_OUTER_STEP = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True)
class Allocation:
    """`cpus_per_node`: of the node with the fewest; None where Slurm does not say."""

    job_id: str
    num_nodes: int
    nodelist: str
    cpus_per_node: int | None

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Allocation | None:
        """The allocation in which this process runs; None outside of Slurm."""
        job_id = environment.get("SLURM_JOB_ID")
        if job_id is None:
            return None
        counts = [
            int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
        ]
        return cls(
            job_id,
            int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            environment.get("SLURM_JOB_NODELIST", ""),
            min(counts, default=None),
        )

    def first_node(self) -> str:
        """Raises: LaunchError."""
        try:
            done = subprocess.run(
                ["scontrol", "show", "hostnames", self.nodelist], capture_output=True, text=True, timeout=60, check=True
            )
            return done.stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"scontrol cannot name the nodes of this job ({error}); {shown_slurm_variables()}"
            ) from error


def require_nodes(nodes: int, allocation: Allocation | None) -> None:
    """Raises: LaunchError when a job of several nodes, or of several processes, has not got exactly these nodes."""
    if allocation is None:
        if nodes > 1:
            raise LaunchError(
                f"--nodes {nodes}: there is no Slurm allocation here; run the job through sbatch or salloc, or the "
                "workflow with a cluster profile"
            )
    elif allocation.num_nodes != nodes:
        raise LaunchError(
            f"--nodes {nodes}: the allocation has {allocation.num_nodes}; make them equal (resource 'nodes' of the "
            f"rule, --nodes of sbatch): {shown_slurm_variables()}"
        )


class Ended(Exception):
    """The processes did not reach the end of the job; what the job's process has to say and to exit with."""

    def __init__(self, message: str, exit_code: int, failure_class: str | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.failure_class = failure_class


def launch(
    nodes: int, processes_per_node: int, run_dir: Path, worker: tuple[str, ...], threads_per_process: int = 0
) -> None:
    """Run the processes to their end. Raises: LaunchError before they begin; Ended.

    `worker`: arguments of Python for each process; `threads_per_process`: 0 leaves their number to torchrun.
    """
    allocation = Allocation.current()
    require_nodes(nodes, allocation)

    with _folder(run_dir, nodes, allocation) as path:
        endpoint = f"{allocation.first_node()}:{_free_port()}" if allocation is not None and nodes > 1 else ""
        job = NodeJob(path, 0, nodes, processes_per_node, worker, endpoint, threads_per_process)
        code = _run_on_nodes(_srun(job, allocation.cpus_per_node)) if allocation and endpoint else supervise(job)
        end = LaunchFolder(path).verdict(code)
    if end.code != 0:
        raise Ended(end.message, end.code, end.failure_class)


def tell_who_started_this(error: Exception) -> None:
    """Write down why this process fails where its launcher, or else the executor, looks for it."""
    is_told = "SUBMITIT_JOB_STATUS" in os.environ or "IMPLICIT_LLM_LAUNCH_FOLDER" in os.environ
    if is_told and getattr(error, "failure_class", "") is not None:
        launched.report_failure(error)


def leave_other_processes() -> None:
    """Let go of them at the end of a job; without it NCCL complains."""
    if "RANK" in os.environ:
        from implicit_llm.training.distributed import leave_world

        leave_world()


def _run_on_nodes(command: Sequence[str]) -> int:
    """Run srun to its end; it hands SIGUSR2 on to the node agents, which take it once if Slurm sends it as well."""
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_STEP}
    with StopSignals() as stop:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        told: list[int] = []

        def tell() -> None:
            if not told:
                told.append(process.pid)
                process.send_signal(signal.SIGUSR2)

        return wait(process, stop, tell)


def _srun(job: NodeJob, cpus: int | None) -> list[str]:
    command = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--distribution=block"]
    # Beside the step that this process is in; an end of one node with an error is the end of all.
    command += ["--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--input=none", "--export=ALL", "--mpi=none"]
    # Without the first a node's processes would share the CPUs of a single task.
    command += ["--cpu-bind=none", *([] if cpus is None else [f"--cpus-per-task={cpus}"])]
    return [*command, sys.executable, "-m", AGENTS, "node", job.to_json()]


@contextmanager
def _folder(run_dir: Path, nodes: int, allocation: Allocation | None) -> Iterator[Path]:
    """An empty folder that all nodes see, deleted afterwards.

    Across nodes it is below the run directory and named after the Slurm job: what a killed attempt of it left goes.
    """
    if nodes == 1 or allocation is None:
        with tempfile.TemporaryDirectory(prefix="implicit-llm-") as name:
            yield Path(name)
        return
    path = (run_dir / f".launch-{allocation.job_id}").absolute()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _free_port() -> int:
    """A port that is free on this node, which is the first one of the job."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
