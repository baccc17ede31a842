"""Seconds for which training stands still at a save, and seconds until the state is on disk.

    python -m tests.benchmarks.saving mamba2-1.3b-implicit --directory /scratch --pause 60

The model and AdamW's states have their full size and are on the GPU where there is one. The first save also takes the
host memory for the copy. `--pause` stands for the steps between two saves: with less than a write takes, the next save
waits for the write before.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.training.operations.checkpoint import CheckpointStore, TrainingState
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule
from implicit_llm.training.optimizer import build_optimizer
from implicit_llm.training.state import model_tensors, optimizer_tensors, random_state
from implicit_llm_contracts.config.training import OptimizerConfig, Runtime
from implicit_llm_contracts.runs.journal import Journal
from tests.measuring import DEVICE, card, keep, options_of, seconds, show

METRICS = {"columns": [], "window": [], "recent": [], "totals": {}}


def main() -> None:
    arguments = {
        "config": {"nargs": "?", "default": "mamba2-130m-implicit"},
        "--directory": {"type": Path, "help": "on the file system to measure; default that of temporary files"},
        "--saves": {"type": int, "default": 3},
        "--pause": {"type": float, "default": 10.0, "metavar": "SECONDS"},
    }
    options = options_of(__doc__, arguments)
    rows = []
    model = AutoModelForCausalLM.from_config(implicit_llm.load_config(options.config)).to(DEVICE)
    optimizer = build_optimizer(model, OptimizerConfig(0.9, 0.95, 1e-8, 0.1, 1.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=options.directory) as work, StopRequest() as stop:
        journal = Journal(None)
        store = CheckpointStore(Path(work), {}, journal)
        schedule = SaveSchedule(Runtime(save_steps=1), stop, range(options.saves + 1), store, journal)
        with schedule:
            for step in range(1, options.saves + 2):  # the last one is written before its save returns
                schedule.after_step(step)
                weights, moments = model_tensors(model), optimizer_tensors(optimizer, model)
                state = TrainingState(step, {}, weights, moments, [random_state()], METRICS)
                stall_s = seconds(partial(schedule.commit, state))
                time.sleep(options.pause)
                rows.append({"gb": state.num_bytes / 1e9, "stall_s": stall_s, "write_s": store.last_save_s})
    show(rows, card())
    keep(options.out, rows)


if __name__ == "__main__":
    main()
