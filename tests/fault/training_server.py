"""Trains small phases for the tests beside it.

An order is {"run_dir", "data", "start": run directories (start may be null), "config": {...}, "runtime": {...}, "env"},
and for several processes "processes": N and "poison": {"rank", "step", "what"}. When one of them fails, the others
are told to end, as torchrun does; each says how it ended in <run directory>/rank-<N>.json.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own

from torch.multiprocessing.spawn import ProcessExitedException, start_processes  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from transformers import Trainer  # noqa: E402, F401  (imported lazily otherwise, in every process)

from implicit_llm.training import stage  # noqa: E402
from implicit_llm_contracts.runs import atomic  # noqa: E402
from implicit_llm_jobs.stage import run_stage  # noqa: E402
from tests.fault.forks import exit_code_of, serve  # noqa: E402
from tests.unit.training.small_runs import poison, request  # noqa: E402


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
    try:
        start_processes(_train_rank, (order, world), order["processes"], start_method="fork")
    except ProcessExitedException as end:
        return end.exit_code
    return 0


def _train_rank(rank: int, order: dict[str, Any], world: dict[str, Any]) -> None:
    updates: list[None] = []
    register_optimizer_step_post_hook(lambda *_: updates.append(None))
    poison(**order["poison"])

    def train_and_tell(order: dict[str, Any]) -> None:
        try:
            train(order)
        except BaseException as error:
            end = {"class": getattr(error, "failure_class", "bug"), "message": str(error), "updates": len(updates)}
            Path(order["run_dir"], f"rank-{rank}.json").write_text(json.dumps(end))
            raise

    ranks = {"RANK": rank, "LOCAL_RANK": rank, **world}
    sys.exit(exit_code_of(train_and_tell, {**order, "env": {key: str(value) for key, value in ranks.items()}}))


if __name__ == "__main__":
    atomic.RETRY_WAITS_S = (0.01, 0.02, 0.03)
    serve(run)
