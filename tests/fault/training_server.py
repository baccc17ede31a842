"""Trains small phases for the tests beside it.

An order is {"run_dir", "data", "start": run directories (start may be null), "config": {...}, "runtime": {...}, "env"},
and for several processes "processes": N and "poison": {"rank", "step", "what"} or null. Several processes are treated
as torchrun does: when one fails, the others are told to end; each says how it ended in <run directory>/rank-<N>.json.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from transformers import Trainer  # noqa: E402, F401  (imported lazily otherwise, in every process)

from implicit_llm.training import stage  # noqa: E402
from implicit_llm_contracts.runs import atomic  # noqa: E402
from implicit_llm_jobs.stage import run_stage  # noqa: E402
from tests.fault.forks import exit_code_of, serve  # noqa: E402
from tests.unit.training.distributed_run import poison  # noqa: E402
from tests.unit.training.small_runs import request  # noqa: E402


def run(order: dict[str, Any]) -> None:
    if order.get("processes", 1) == 1:
        train(order)
    else:
        sys.exit(train_together(order))


def train(order: dict[str, Any]) -> None:
    start = order["start"] and Path(order["start"])
    given = request(Path(order["run_dir"]), order["config"], Path(order["data"]), start, **order["runtime"])
    run_stage(given, stage.run)


def train_together(order: dict[str, Any]) -> int:
    """Exit code of the first process that fails, else 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": order["processes"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = {_fork_rank(order, rank, world) for rank in range(order["processes"])}
    first = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return first


def _fork_rank(order: dict[str, Any], rank: int, world: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        environment = {key: str(value) for key, value in {"RANK": rank, "LOCAL_RANK": rank, **world}.items()}
        os._exit(exit_code_of(_train_rank, {**order, "env": environment}))
    return pid


def _train_rank(order: dict[str, Any]) -> None:
    rank = os.environ["RANK"]
    updates: list[None] = []
    register_optimizer_step_post_hook(lambda *_: updates.append(None))
    if order.get("poison"):
        poison(**order["poison"])
    try:
        train(order)
    except BaseException as error:
        end = {"class": getattr(error, "failure_class", "bug"), "message": str(error), "updates": len(updates)}
        Path(order["run_dir"], f"rank-{rank}.json").write_text(json.dumps(end))
        raise


if __name__ == "__main__":
    atomic.RETRY_WAITS_S = (0.01, 0.02, 0.03)
    serve(run)
