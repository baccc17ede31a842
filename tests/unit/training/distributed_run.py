"""Trains a small phase in every process of torchrun; without torchrun, in two processes of the workflow's launcher.

Arguments: run directory, data run directory, JSON of {"config": name in CONFIGS, "runtime": {...}, "poison": {"rank",
"step", "what"} or nothing}. what: "loss", "solver", "memory", "kill" or "hang".
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from torch import distributed as dist

from implicit_llm.solver.fixed_point import Best
from implicit_llm.solver.stats import NonFiniteState
from implicit_llm.training import stage
from implicit_llm.training.loop import TrainingLoop
from implicit_llm_jobs.stage import run_stage
from implicit_llm_workflow.launching.launch import Ended, launch, tell_who_started_this
from tests.unit.training.small_runs import FREE, IMPLICIT, LLAMA, request, train_config

STEPS, MANY_STEPS = 6, 200
_SHORT: dict[str, Any] = {"phase": {"end_step": STEPS}, "total_steps": STEPS}
# Without dropout: each process draws masks of its own.
CONFIGS = {
    "explicit": train_config({**LLAMA, "attention_dropout": 0.0}, **_SHORT),
    "long": train_config({**LLAMA, "attention_dropout": 0.0}, phase={"end_step": MANY_STEPS}, total_steps=MANY_STEPS),
    "implicit": train_config(
        {**IMPLICIT, "dropout": 0.0}, phase={"end_step": STEPS, "solver": FREE}, total_steps=STEPS
    ),
}
CONFIGS["implicit, sums in bf16"] = CONFIGS["implicit"] | {"reduction": "bf16"}


def poison(rank: int, step: int, what: str) -> None:
    """Let one rank's loss, its solver or its memory fail in one step, or the whole rank: killed, hanging."""
    train_step = TrainingLoop.train_step

    def goes_wrong(loop: TrainingLoop, batches: list[dict[str, Any]]) -> None:
        if (int(os.environ["RANK"]), loop.global_step + 1) == (rank, step):
            WRONG[what](loop)
        train_step(loop, batches)

    TrainingLoop.train_step = goes_wrong  # type: ignore[method-assign]


def _spoil_the_loss(loop: TrainingLoop) -> None:
    compute_loss = loop.compute_loss
    loop.compute_loss = lambda *given: compute_loss(*given) * math.nan  # type: ignore[method-assign]


def _let_the_solver_diverge(loop: TrainingLoop) -> None:
    became_nan = NonFiniteState("the fixed-point iteration became NaN at position 5")
    Best.raise_if_not_finite = Mock(side_effect=became_nan)  # type: ignore[method-assign]


def _flip_a_bit(loop: TrainingLoop) -> None:
    next(loop.model.parameters()).data.view(-1).view(torch.int32)[3] ^= 1 << 16


WRONG: dict[str, Callable[[TrainingLoop], object]] = {
    "loss": _spoil_the_loss,
    "solver": _let_the_solver_diverge,
    "memory": _flip_a_bit,
    "kill": lambda loop: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda loop: threading.Event().wait(),
}


def launched() -> int:
    """Start this module through the launcher, and end as the command line does."""
    try:
        launch(1, 2, Path(sys.argv[1]), ("-m", "tests.unit.training.distributed_run", *sys.argv[1:]), 1)
    except Ended as end:
        tell_who_started_this(end)
        sys.stderr.write(f"error: {end}\n")
        return end.exit_code
    return 0


def main() -> int:
    if "RANK" not in os.environ:
        return launched()
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own
    run_dir, data, order = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if order["poison"] is not None:
        poison(**order["poison"])
    try:
        run_stage(request(run_dir, CONFIGS[order["config"]], data, **order["runtime"]), stage.run)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
