"""The stage `train`: one phase of a curriculum, from nothing or from the phase before to model and training state."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from implicit_llm.cards.model_card import FILE_NAME as CARD_FILE
from implicit_llm.cards.training_card import training_card
from implicit_llm.device import choose_device
from implicit_llm.kernels.selection import select_kernels_for
from implicit_llm.training.batches import BatchLayout, BatchSizeError, Dataset
from implicit_llm.training.distributed import (
    from_main,
    join_world,
    rank,
    require_own_gpu,
    require_world,
    wait_for_all,
    world_size,
)
from implicit_llm.training.loop import TrainingJob, TrainingLoop
from implicit_llm.training.metrics import StepMetrics
from implicit_llm.training.model import apply_runtime, build_model
from implicit_llm.training.non_finite import NonFiniteTraining
from implicit_llm.training.operations.checkpoint import Checkpoint
from implicit_llm.training.operations.checkpoint_store import KEPT_DIR, CheckpointStore, NoCheckpoint, step_name
from implicit_llm.training.operations.committing import Committer
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule
from implicit_llm.training.operations.solver_alarm import SolverAlarm
from implicit_llm.training.operations.status import StatusLine, shown
from implicit_llm.training.operations.watchdog import Watchdog
from implicit_llm.training.replicas import ReplicasDiffer
from implicit_llm.training.starting import DATA_ROLE, find_start, given_input, rewind_journal
from implicit_llm.training.state import load_model, model_tensors
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import commit_directory, temporary_name, write_atomic
from implicit_llm_contracts.runs.errors import Preempted
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.logs import wants_bar
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import open_dataset

MODEL_DIR, SUMMARY_FILE = "model", "training.json"


@dataclass(frozen=True)
class Setup:
    """A phase ready to go on from `start` (None: from nothing)."""

    config: TrainConfig
    runtime: Runtime
    device: torch.device
    dataset: Dataset
    model: PreTrainedModel
    store: CheckpointStore
    start: Checkpoint | None


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm train`: leaves model/, checkpoint/ and training.json below work.

    Raises: UserError; Preempted once the state is committed after a stop request.
    """
    runtime = fill(Runtime, {key: value for key, value in context.runtime.items() if value is not None}, "runtime")
    with StopRequest() as stop, Watchdog(runtime.hang_s or None, context.work) as watchdog:
        setup = _prepare(context, runtime)
        if setup.start is None or setup.start.global_step < setup.config.phase.end_step:
            if stop:
                raise Preempted(f"train/{context.name}: {stop.received} before the first step; start it again")
            try:
                _train(context, setup, stop, watchdog)
            except (Preempted, NonFiniteTraining, ReplicasDiffer):
                if not context.is_main:
                    stop.let_main_end_first()
                raise
        watchdog.beat()
        return _finish(context, setup)


def _prepare(context: StageContext, runtime: Runtime) -> Setup:
    where = f"train/{context.name}"
    config = fill(TrainConfig, context.config, where)
    device = join_world(_set_up_torch(runtime))
    require_world()
    dataset = open_dataset(given_input(context, DATA_ROLE).work)
    model = build_model(config, dataset.vocab_size, where)
    apply_runtime(model, runtime, where)
    identity = {
        "stage": context.stage,
        "fingerprint": context.fingerprint,
        "config": context.config,
    }
    store = CheckpointStore(context.work, identity, context.journal, config.phase.keep)
    start = from_main(find_start(context, config, runtime, store) if context.is_main else None)
    if context.is_main:
        store.require_space(sum(3 * tensor.nbytes for tensor in model_tensors(model).values()))
        rewind_journal(context, start)
    return Setup(config, runtime, device, dataset, model, store, start)


def _train(context: StageContext, setup: Setup, stop: StopRequest, watchdog: Watchdog) -> None:
    config, runtime = setup.config, setup.runtime
    layout = BatchLayout.choose(config.batch_size, world_size(), rank(), runtime.micro_batch_size)
    if config.phase.couples_sequences and layout.micro_batch_size < config.batch_size:
        raise BatchSizeError(
            f"train/{context.name}: solver.stop: batch needs all {config.batch_size} sequences in one micro-batch "
            f"on one device, not {layout.micro_batch_size}; drop micro_batch_size, use one process, or stop: sequence"
        )
    schedule = SaveSchedule(runtime, stop, config.phase.end_step, config.phase.keep, setup.device)
    status = StatusLine(context.name, context.log, bar=wants_bar(runtime.progress))

    def report(step: int, values: dict[str, float]) -> None:
        context.journal.metrics(step, values)
        status.values = values

    def on_skipped(steps: list[int]) -> None:
        where = ", ".join(map(str, steps))
        context.log.info("fp16 gradients overflowed at step %s: left out, the scale is halved", where)
        context.journal.event("update_skipped", steps=steps)

    job = TrainingJob(
        name=context.name,
        config=config,
        runtime=runtime,
        dataset=setup.dataset,
        layout=layout,
        identity=dict(setup.store.identity),
        work=context.work,
        device=setup.device,
        saves=schedule,
        status=status,
        watchdog=watchdog,
        commit=Committer(setup.store, schedule, context.journal, runtime.grace_s),
        report=report,
        observe=SolverAlarm(runtime, context.journal).observe,
        on_skipped=on_skipped,
    )
    context.log.info("%s", _headline(context, setup, layout))
    context.journal.event("training_started", step=0 if setup.start is None else setup.start.global_step)
    reached = TrainingLoop(setup.model, job, setup.start).run()
    if reached < config.phase.end_step:
        raise Preempted(
            f"train/{context.name}: stopped by {stop.received} after step {reached}, which is committed; start it again"
        )


def _finish(context: StageContext, setup: Setup) -> StageResult:
    """Model, final training state and summary, from the checkpoint at the end of the phase."""
    kept = [f"{KEPT_DIR}/{step_name(step)}" for step in setup.config.phase.keep]
    files = [MODEL_DIR, "checkpoint", *kept, SUMMARY_FILE]
    if not context.is_main:
        wait_for_all()
        return StageResult(files, {})
    final = setup.store.newest()
    if final is None or final.global_step != setup.config.phase.end_step:
        raise NoCheckpoint(f"{setup.store.final}: the state at the end of the phase was damaged; start again")
    load_model(setup.model, final.model(), str(final.path))
    summary = _summary(context, setup, final)
    _save_model(setup.model, training_card(context, setup.model, summary), context.work / MODEL_DIR)
    faults.point("train.before_summary")
    write_atomic(context.work / SUMMARY_FILE, json.dumps(summary, sort_keys=True, indent=1) + "\n")
    setup.store.finish(final)
    context.log.info(
        "%s: phase finished at step %d, %s", context.name, final.global_step, ", ".join(shown(summary["metrics"]))
    )
    wait_for_all()
    return StageResult(files, summary)


def _save_model(model: PreTrainedModel, card: str, directory: Path) -> None:
    tmp = temporary_name(directory)
    try:
        model.save_pretrained(tmp)
        (tmp / CARD_FILE).write_text(card, encoding="utf-8")
        faults.point("train.before_model")
        commit_directory(tmp, directory)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _summary(context: StageContext, setup: Setup, final: Checkpoint) -> dict[str, Any]:
    """Nothing in it depends on the runtime. metrics: means over the last steps."""
    config = setup.config
    metrics = StepMetrics(config.task)
    metrics.load_state(final.metrics)
    return {
        "phase": config.phase.name,
        "global_step": final.global_step,
        "tokens": metrics.totals.tokens,
        "flops": metrics.totals.flops,
        "num_parameters": setup.model.num_parameters(),
        "metrics": metrics.recent(),
        "data": context.inputs[DATA_ROLE].manifest.identity["config"],
    }


def _headline(context: StageContext, setup: Setup, layout: BatchLayout) -> str:
    phase = setup.config.phase
    first = phase.start_step if setup.start is None else setup.start.global_step
    solver = setup.config.phase.solver
    how = "explicit" if solver is None else solver.mode
    return (
        f"{context.name}: steps {first} to {phase.end_step}, {how}, {setup.model.num_parameters():,} parameters, "
        f"{layout.batch_size} x {setup.dataset.length} tokens a step in {layout.accumulation_steps} micro-batch(es) on "
        f"{layout.world_size} {setup.device.type}, {setup.config.precision}, {torch.get_num_threads()} threads"
    )


def _set_up_torch(runtime: Runtime) -> str:
    """Apply the runtime's settings; return the device's type. Raises: NoGpu, WrongWorld, KernelsUnavailable."""
    transformers_logging.disable_progress_bar()  # of save_pretrained
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    if runtime.tf32:
        torch.set_float32_matmul_precision("high")
    device = choose_device(runtime.device)
    if device == "cuda":
        require_own_gpu()
    select_kernels_for(device, runtime.kernels)
    return device
