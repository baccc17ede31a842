"""What a trainer is given: the job, and the arguments that leave to the Hugging Face Trainer what it does well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from implicit_llm.training.batches import BatchLayout, Dataset
from implicit_llm.training.operations.checkpoint import TrainingState
from implicit_llm_contracts.config.training import Runtime, TrainConfig


@dataclass(frozen=True)
class TrainingJob:
    """What a trainer needs beside the model.

    commit: takes a state of this rank 0 and puts it on disk. report: takes (global step, metrics of the steps since the
    last report). observe: takes (global step, metrics of every step up to it that was not yet observed). on_skipped:
    takes the steps whose update was left out. All are called on rank 0 only.
    """

    name: str
    config: TrainConfig
    runtime: Runtime
    dataset: Dataset
    layout: BatchLayout
    identity: dict[str, Any]
    work: Path
    commit: Callable[[TrainingState], None]
    report: Callable[[int, dict[str, float]], None]
    observe: Callable[[int, list[dict[str, float]]], None] = lambda step, rows: None
    on_skipped: Callable[[list[int]], None] = lambda steps: None


def training_arguments(config: TrainConfig, runtime: Runtime, device: str, work: Path) -> TrainingArguments:
    """Arguments that leave to the Trainer the loop and DDP; also joins the process group under torchrun."""
    args = TrainingArguments(
        output_dir=str(work),
        max_steps=config.phase.end_step,
        max_grad_norm=config.optimizer.max_grad_norm,
        learning_rate=config.schedule.peak_learning_rate,
        use_cpu=device == "cpu",
        seed=config.seed,
        logging_steps=runtime.log_every_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would wait for the device in every step, and hide what must stop the run
        save_strategy="no",  # the callback of save_schedule.py decides
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ignore_data_skip=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
        label_names=["labels"],
    )
    args._n_gpu = min(1, args.n_gpu)  # several visible GPUs without torchrun would mean nn.DataParallel
    return args
