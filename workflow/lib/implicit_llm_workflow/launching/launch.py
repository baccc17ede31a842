"""Training in several processes: torchrun on one node, srun and torchrun on several.

The launcher is the job's own process, to which stop signals are sent. It hands them on, waits, and ends with the exit
code and the class of the process that was the reason for the end. On each of several nodes srun starts an agent, which
does the same there: `python -m ...launching.launch node JSON`. torchrun runs in a process of its own, `... launch
torchrun`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import launched
from implicit_llm_contracts.runs.launched import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    PARENT_VARIABLE,
    WORLD_VARIABLE,
    Death,
    LaunchFolder,
    die_with_parent,
)

MODULE = "implicit_llm_workflow.launching.launch"
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LOOK_EVERY_S = 0.2
JOIN_TIMEOUT_S = 300  # from the first node's start to the last one's: each of them has to import torch
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
    """The allocation or the environment is not what the job asked for."""

    failure_class = "env"


def shown_slurm_variables() -> str:
    """The variables in which Slurm says what it allocated, for messages."""
    found = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    return " ".join(found) or "no SLURM_* variables are set"


@dataclass(frozen=True)
class NodeJob:
    """`endpoint`: host:port of the rendezvous on the first node, "" for a job of a single node.

    `worker`: arguments of Python for each process. `threads`: of each process, 0 leaves them to torchrun.
    """

    folder: Path
    node: int
    nodes: int
    processes: int
    worker: tuple[str, ...]
    endpoint: str = ""
    threads: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def of_json(cls, text: str, node: int) -> NodeJob:
        """The part of another node in the same job."""
        return fill(cls, {**json.loads(text), "node": node}, "node")


class StopSignals:
    """Context in which stop signals are only noted; afterwards they do what they did before.

    A Ctrl-C (SIGINT) after the first of them raises KeyboardInterrupt, as it does in the training processes.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        is_in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # Ctrl-C is not meant for it
        for number in STOP_SIGNALS:
            if number == signal.SIGINT and is_in_background:
                continue
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


def supervise(job: NodeJob) -> int:
    """Run the node's processes to their end; a stop signal reaches each of them once, as SIGUSR2, when it is ready.

    Returns: the exit code of torchrun, or minus the signal that ended it; the folder holds the reasons.
    """
    folder, told = LaunchFolder(job.folder), set[int]()

    def tell() -> None:
        for pid in folder.announced(job.node) - told:
            told.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)

    with StopSignals() as stop:
        # Out of reach of what is sent to the process group: torchrun does not survive SIGUSR2.
        process = subprocess.Popen(_torchrun(job), env=_environment(job), start_new_session=True)
        return wait(process, stop, tell)


def wait(process: subprocess.Popen[Any], stop: StopSignals, tell: Callable[[], None]) -> int:
    """Wait for the end of a process, calling `tell` again and again once a stop signal has come; kills it on errors."""
    try:
        while True:
            if stop.received is not None:
                tell()
            try:
                return process.wait(timeout=LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()


def _torchrun(job: NodeJob) -> list[str]:
    options = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.processes}", "--max-restarts=0"]
    if job.endpoint:
        is_host = int(job.node == 0)
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={job.endpoint}", f"--rdzv-id={job.folder.name}"]
        options += [f"--rdzv-conf=is_host={is_host},join_timeout={JOIN_TIMEOUT_S},read_timeout={JOIN_TIMEOUT_S}"]
        if "SLURMD_NODENAME" in os.environ:
            options.append(f"--local-addr={os.environ['SLURMD_NODENAME']}")
    else:
        options.append("--standalone")
    return [sys.executable, "-m", MODULE, "torchrun", *options, *job.worker]


def _environment(job: NodeJob) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    launch = {FOLDER_VARIABLE: str(job.folder), NODE_VARIABLE: str(job.node), PARENT_VARIABLE: str(os.getpid())}
    return {**os.environ, **threads, **launch, WORLD_VARIABLE: str(job.nodes * job.processes)}


def torchrun(arguments: list[str]) -> int:
    """Run torchrun in this process; returns 0, or 1 when a process ended badly or not all nodes came.

    torchrun gives its processes 30 seconds after a SIGTERM, too few for a large checkpoint, and dies of SIGUSR2; so it
    hears of neither here, and the node agent tells the processes itself. How they ended goes to the launch folder.
    """
    _become_child_of_the_agent()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    folder, node = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ[NODE_VARIABLE])
    host = socket.gethostname()
    known = {word for action in run.get_args_parser()._actions for word in action.option_strings}
    ours = ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"] if "--signals-to-handle" in known else []
    try:
        # torchrun's parser takes options of the module, such as --log, for abbreviations of its own.
        end = arguments.index("-m") + 2
        options = run.parse_args([*ours, *arguments[:end]])
        options.training_script_args = arguments[end:]
        run.run(options)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
        folder.record_deaths(node, [Death(rank, failure.exitcode, host) for rank, failure in failures])
        return 1
    except RendezvousError as error:
        if folder.has_begun:  # the first node has gone, for a reason of its own
            return 1
        reason = LaunchError(
            f"the nodes did not come together ({type(error).__name__}); see that all of them can reach "
            f"the first one: {shown_slurm_variables()}"
        )
        folder.record_end(reason, rank=-1 - node)
        return 1
    return 0


def _become_child_of_the_agent() -> None:
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the processes that torchrun starts here
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the processes inherit this, until they have a handler
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # this they do not inherit: torchrun may end them so


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
    def current(cls) -> Allocation | None:
        """The allocation in which this process runs; None outside of Slurm."""
        job_id = os.environ.get("SLURM_JOB_ID")
        if job_id is None:
            return None
        cpus_per_node = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return cls(
            job_id,
            int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
            os.environ.get("SLURM_JOB_NODELIST", ""),
            min(map(int, cpus_per_node), default=None),
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
    given = 1 if allocation is None else allocation.num_nodes
    if given != nodes:
        raise LaunchError(
            f"--nodes {nodes}: there are {given} here; give sbatch or salloc, or the rule by its resource `nodes`, the "
            f"same number, and run the workflow with a cluster profile: {shown_slurm_variables()}"
        )


class Ended(Exception):
    """The processes did not reach the end of the job; what the job's process has to say and to exit with."""

    def __init__(self, message: str, exit_code: int, failure_class: str | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.failure_class = failure_class


def launch(
    nodes: int, processes_per_node: int, run_dir: Path, worker: tuple[str, ...], threads_per_process: int
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
    return [*command, sys.executable, "-m", MODULE, "node", job.to_json()]


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


def main(arguments: list[str]) -> int:
    """Run `torchrun OPTIONS -m MODULE ...`, or `node JSON` under srun, which tells the node's number; the exit code."""
    if arguments[0] == "torchrun":
        return torchrun(arguments[1:])
    job = NodeJob.of_json(arguments[1], node=int(os.environ["SLURM_NODEID"]))
    if int(os.environ.get("SLURM_NTASKS", job.nodes)) != job.nodes:
        error = LaunchError(f"{job.nodes} nodes were asked for, srun gives others: {shown_slurm_variables()}")
        LaunchFolder(job.folder).record_end(error, rank=-1 - job.node)
        return error.exit_code
    return LaunchFolder(job.folder).verdict(supervise(job)).code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
