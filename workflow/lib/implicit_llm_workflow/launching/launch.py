"""Run a training job in several processes, on one node or several.

The launcher is the job's own process, which receives stop signals. On one node, it starts the training processes,
forwards each stop signal as SIGUSR2, waits, and ends with the exit code and the failure class of the process that
caused the end. On several nodes, it runs srun instead, which starts an agent on each node. The agent,
`python -m ...launching.launch JSON`, starts and supervises the training processes of its node.

The training processes get the environment variables that torchrun sets. torchrun itself is not usable: after a SIGTERM
it gives its processes only 30 seconds, too few for a large checkpoint, and SIGUSR2 kills it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import launched
from implicit_llm_contracts.runs.launched import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    WORLD_VARIABLE,
    Death,
    LaunchFolder,
    ProcessEnd,
)

MODULE = "implicit_llm_workflow.launching.launch"
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LOOK_EVERY_S = 0.2
GRACE_S = 30.0  # for the remaining processes after one has failed
_SHOWN = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_GPUS",
    "CUDA_VISIBLE_DEVICES",
)


class LaunchError(UserError):
    """The allocation or the environment differs from what the job requires."""

    failure_class = "env"


def shown_slurm_variables() -> str:
    """Return Slurm's variables about the allocation as text for messages, or a text that none is set."""
    found = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    return " ".join(found) or "no SLURM_* variables are set"


@dataclass(frozen=True)
class NodeJob:
    """The processes of a job on one node.

    `folder`: the path of the `LaunchFolder`. `node`: the number of this node, from 0. `processes`: the number of
    processes on each node. `worker`: the arguments of Python for each process. `host`, `port`: the address on the first
    node at which all processes find each other. `threads`: the CPU threads of each process; 0 means $OMP_NUM_THREADS,
    or one if this variable is not set.
    """

    folder: Path
    node: int
    nodes: int
    processes: int
    worker: tuple[str, ...]
    host: str
    port: int
    threads: int = 0

    def rank(self, number: int) -> int:
        """Return the global rank of this node's process `number`; both count from 0."""
        return self.node * self.processes + number

    def variables(self, number: int) -> dict[str, str]:
        """Return the variables that extend the launcher's environment for this node's process `number`."""
        values = {
            "RANK": self.rank(number),
            "LOCAL_RANK": number,
            "WORLD_SIZE": self.nodes * self.processes,
            "LOCAL_WORLD_SIZE": self.processes,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
            "OMP_NUM_THREADS": self.threads or os.environ.get("OMP_NUM_THREADS", 1),
            FOLDER_VARIABLE: self.folder,
            NODE_VARIABLE: self.node,
            WORLD_VARIABLE: self.nodes * self.processes,
        }
        return {name: str(value) for name, value in values.items()}


class LauncherSignals:
    """A context in which the first stop signal is recorded in `received`; its end restores the previous handlers.

    A Ctrl-C (SIGINT) after the first signal raises KeyboardInterrupt. A process that ignores SIGINT still ignores it.
    """

    received: signal.Signals | None = None

    def __enter__(self) -> LauncherSignals:
        is_in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # then Ctrl-C is meant for another process
        numbers = STOP_SIGNALS[:-1] if is_in_background else STOP_SIGNALS
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


def supervise(job: NodeJob) -> int:
    """Run the node's processes to their end; pass a stop signal to each process as soon as it can handle the signal.

    Returns: 0, or 1 if a process ended with another exit code than 0. In this case, the launch folder stores these
    exit codes, and the remaining processes are ended.
    """
    folder = LaunchFolder(job.folder)
    with LauncherSignals() as stop, _processes(job) as processes:
        codes = wait(processes, stop, lambda: folder.announced(job.node))
        if not any(codes):
            return 0
        host = socket.gethostname()
        folder.record_deaths(
            job.node, [Death(job.rank(number), code, host) for number, code in enumerate(codes) if code]
        )
    return 1


def wait(
    processes: Sequence[subprocess.Popen[Any]], stop: LauncherSignals, ready: Callable[[], set[int]]
) -> list[int | None]:
    """Wait until all processes have ended or one has failed; return their exit codes, None for running ones.

    `ready` returns the pids that can handle a stop signal by now. After a stop signal of any kind, each of these pids
    gets one SIGUSR2.
    """
    told = set[int]()
    while True:
        for pid in ready() - told if stop.received is not None else ():
            told.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return codes
        time.sleep(LOOK_EVERY_S)


@contextmanager
def _processes(job: NodeJob) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start a node's training processes and yield them; at the end of the block, end the processes that still run.

    These get a SIGTERM, and are killed after GRACE_S. An exception in the block kills all processes at once.
    """
    prepare, processes = partial(_prepare, os.getpid()), list[subprocess.Popen[Any]]()
    try:
        for number in range(job.processes):
            # Each process has its own session, so that signals to the launcher's process group do not reach it.
            process = subprocess.Popen(
                [sys.executable, *job.worker],
                env={**os.environ, **job.variables(number)},
                start_new_session=True,
                preexec_fn=prepare,
            )
            processes.append(process)
        yield processes
    except BaseException:
        for process in processes:
            process.kill()
        raise
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _prepare(parent: int) -> None:
    """Make this new process end with the launcher and ignore SIGUSR2 until its program installs a handler."""
    launched.die_with(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


# Slurm sets these for the step in which srun is called. The step that srun starts must not inherit them.
_OUTER_STEP = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True)
class Allocation:
    """The nodes that Slurm allocated to this job; outside of Slurm, this machine.

    `cpus_per_node`: the number of CPUs of the node that has the fewest; None if Slurm does not report it.
    """

    job_id: str = ""
    num_nodes: int = 1
    cpus_per_node: int | None = None

    @classmethod
    def current(cls) -> Allocation:
        """Return the allocation in which this process runs."""
        if "SLURM_JOB_ID" not in os.environ:
            return cls()
        cpus_per_node = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        return cls(os.environ["SLURM_JOB_ID"], num_nodes, min(map(int, cpus_per_node), default=None))


def first_node() -> str:
    """Return the host name of the job's first node. Raises: LaunchError if scontrol cannot name the nodes."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol cannot name the nodes of this job ({error}); {shown_slurm_variables()}") from error


def require_nodes(nodes: int, allocation: Allocation) -> None:
    """Raise LaunchError if the job's allocation does not have exactly this number of nodes."""
    if allocation.num_nodes != nodes:
        raise LaunchError(
            f"--nodes {nodes}: there are {allocation.num_nodes} here; give sbatch or salloc, or the rule by its "
            f"resource `nodes`, the same number, and run the workflow with a cluster profile: {shown_slurm_variables()}"
        )


class Ended(Exception):
    """The processes ended before the job was complete.

    `exit_code`, `failure_class` and the message are those of the process that caused the end. The launcher must exit
    with this code.
    """

    def __init__(self, end: ProcessEnd) -> None:
        super().__init__(end.message)
        self.exit_code, self.failure_class = end.code, end.failure_class


def launch(
    nodes: int, processes_per_node: int, run_dir: Path, worker: tuple[str, ...], threads_per_process: int
) -> None:
    """Run the processes to their end. Raises: LaunchError before they start; Ended unless they succeed.

    `worker`: arguments of Python for each process. `threads_per_process`: 0 means $OMP_NUM_THREADS, or else one.
    """
    allocation = Allocation.current()
    require_nodes(nodes, allocation)
    with _folder(run_dir, allocation) as path:
        host = "127.0.0.1" if nodes == 1 else first_node()
        job = NodeJob(path, 0, nodes, processes_per_node, worker, host, _free_port(), threads_per_process)
        code = supervise(job) if nodes == 1 else _run_on_nodes(_srun(job, allocation.cpus_per_node))
        end = LaunchFolder(path).verdict(code)
    if end.code != 0:
        raise Ended(end)


def end(code: int) -> NoReturn:
    """End this process with an exit code; a process that a launcher started skips the interpreter's clean-up.

    In the clean-up, NCCL would wait forever for captured CUDA graphs that contain its all-reduces, and the launcher
    would wait for this process.
    """
    if "RANK" in os.environ:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run_on_nodes(command: Sequence[str]) -> int:
    """Run srun to its end and return its exit code; after any stop signal, send SIGUSR2 to srun.

    srun forwards the SIGUSR2 to the node agents, which act on it only once even if Slurm sends them one too.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_STEP}
    with (
        LauncherSignals() as stop,
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True) as process,
    ):
        try:
            wait([process], stop, lambda: {process.pid})
        finally:
            process.kill()  # only has an effect after an error, when the process still runs
    return process.returncode


def _srun(job: NodeJob, cpus: int | None) -> list[str]:
    command = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--distribution=block"]
    # The new step shares the resources of the step in which this process runs. If one node fails, all nodes end.
    command += ["--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--input=none", "--export=ALL", "--mpi=none"]
    # Without --cpu-bind=none, a node's processes would share the CPUs of a single task.
    command += ["--cpu-bind=none", *([] if cpus is None else [f"--cpus-per-task={cpus}"])]
    return [*command, sys.executable, "-m", MODULE, json.dumps(asdict(job), default=str)]


@contextmanager
def _folder(run_dir: Path, allocation: Allocation) -> Iterator[Path]:
    """Yield a new empty folder that all nodes can access, and delete it at the end of the block.

    With several nodes, the folder is below the run directory and named after the Slurm job. A folder that a killed
    attempt of the same job left behind is deleted first.
    """
    if allocation.num_nodes == 1:
        path = Path(tempfile.mkdtemp(prefix="implicit-llm-"))
    else:
        path = (run_dir / f".launch-{allocation.job_id}").absolute()
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _free_port() -> int:
    """Return a free port of this machine, which must be the first node of the job; sbatch runs job scripts there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def main(arguments: list[str]) -> int:
    """Run the processes of one node as its agent under srun, and return the exit code.

    `arguments`: the `NodeJob` as JSON, in which the number of the node is replaced by $SLURM_NODEID.
    """
    job = fill(NodeJob, {**json.loads(arguments[0]), "node": int(os.environ["SLURM_NODEID"])}, "node")
    if int(os.environ.get("SLURM_NTASKS", job.nodes)) != job.nodes:
        error = LaunchError(f"{job.nodes} nodes were asked for, srun gives others: {shown_slurm_variables()}")
        LaunchFolder(job.folder).record_end(error, rank=-1 - job.node)
        return error.exit_code
    return LaunchFolder(job.folder).verdict(supervise(job)).code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
