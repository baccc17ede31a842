"""Trains a small phase in every process of torchrun. Arguments: run directory, data run directory, JSON of runtime."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import distributed as dist

from implicit_llm.runs.errors import Preempted
from implicit_llm.runs.stage import run_stage
from implicit_llm.training import stage
from tests.unit.training.small_runs import LLAMA, request, train_config

CONFIG = train_config({**LLAMA, "attention_dropout": 0.0}, phase={"end_step": 4}, total_steps=4)

if __name__ == "__main__":
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own
    run_dir, data, runtime = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    try:
        run_stage(request(run_dir, CONFIG, data, **runtime), stage.run)
        code = 0
    except Preempted as stop:
        code = stop.exit_code
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
