"""One node's part of a job of several processes: start torchrun, hand stop signals to its processes, wait for the end.

On a single node the launcher does this itself; on several, srun starts `python -m ...launching.agents node JSON` once
on each. torchrun runs in a process of its own, `... agents torchrun`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.launched import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    WORLD_VARIABLE,
    Death,
    LaunchFolder,
    die_with_parent,
)

AGENTS = "implicit_llm_workflow.launching.agents"
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
            _signal(pid)

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
    return [sys.executable, "-m", AGENTS, "torchrun", *options, *job.worker]


def _environment(job: NodeJob) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    launch = {FOLDER_VARIABLE: str(job.folder), NODE_VARIABLE: str(job.node)}
    return {**os.environ, **threads, **launch, WORLD_VARIABLE: str(job.nodes * job.processes)}


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return


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
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the processes inherit this, until they have a handler
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # this they do not inherit: torchrun may end them so


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
