"""One node's part of a job of several processes: start torchrun, hand stop signals to its processes, wait for the end.

On a single node the launcher does this itself; on several, srun starts
`python -m implicit_llm_workflow.launching.node_agent` once on each.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from implicit_llm_contracts.runs.launched import FOLDER_VARIABLE, NODE_VARIABLE, WORLD_VARIABLE, LaunchFolder
from implicit_llm_workflow.launching.launch_errors import LaunchError, shown_slurm_variables

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LOOK_EVERY_S = 0.2
JOIN_TIMEOUT_S = 300  # from the first node's start to the last one's: each of them has to import torch


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


def main(arguments: list[str]) -> int:
    """The node's part under srun: the number of this node is from Slurm. Returns: an exit code."""
    parser = argparse.ArgumentParser()
    for name in ("--nodes", "--processes", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("worker", nargs="+")
    given = parser.parse_args(arguments)
    node = int(os.environ["SLURM_NODEID"])
    if int(os.environ.get("SLURM_NTASKS", given.nodes)) != given.nodes:
        error = LaunchError(f"{given.nodes} nodes were asked for, srun gives others: {shown_slurm_variables()}")
        LaunchFolder(given.folder).record_end(error, rank=-1 - node)
        return error.exit_code
    code = supervise(NodeJob(**{**vars(given), "node": node, "worker": tuple(given.worker)}))
    return LaunchFolder(given.folder).verdict(code).code


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
    return [sys.executable, "-m", "implicit_llm_workflow.launching.torchrun_agent", *options, *job.worker]


def _environment(job: NodeJob) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    launch = {FOLDER_VARIABLE: str(job.folder), NODE_VARIABLE: str(job.node)}
    return {**os.environ, **threads, **launch, WORLD_VARIABLE: str(job.nodes * job.processes)}


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
