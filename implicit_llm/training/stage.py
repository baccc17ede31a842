"""Run the stage `train`: train one phase of a curriculum, from the initial weights or from an earlier phase."""

import shlex
import shutil
from dataclasses import replace
from typing import Any

import torch

from implicit_llm.cards import model_card
from implicit_llm.device import set_up_torch
from implicit_llm.models.pretrained import ImplicitPreTrainedModel
from implicit_llm.training.batches import BatchSizeError
from implicit_llm.training.distributed import ReplicasDiffer, gather_objects, join_world, wait_for_all
from implicit_llm.training.loop import TrainingJob, TrainingLoop
from implicit_llm.training.metrics import StepMetrics
from implicit_llm.training.model import apply_runtime, build_model
from implicit_llm.training.non_finite import NonFiniteTraining
from implicit_llm.training.operations.checkpoint import (
    KEPT_DIR,
    Checkpoint,
    CheckpointStore,
    CorruptCheckpoint,
    read_checkpoint,
    step_name,
)
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.status import shown
from implicit_llm.training.operations.watchdog import Watchdog
from implicit_llm.training.state import load_model, model_tensors
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.errors import Preempted, UserError
from implicit_llm_contracts.runs import faults, journal
from implicit_llm_contracts.runs.atomic import new_directory, write_json
from implicit_llm_contracts.runs.fetched_files import CONFIG_FILE
from implicit_llm_contracts.runs.run_directory import DECLARED
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import open_dataset

MODEL_DIR, SUMMARY_FILE = "model", "training.json"
DATA_ROLE, START_ROLE = "data", "start"


class TrainInputError(UserError):
    """The checkpoint at the start or at the end of the phase is missing or damaged."""


def run(context: StageContext) -> StageResult:
    """Run `implicit-llm train`: write model/, checkpoint/, kept checkpoints and training.json below work.

    Raises: UserError; Preempted after a stop request, either before the first step or once the state is committed.
    """
    runtime = fill(Runtime, {key: value for key, value in context.runtime.items() if value is not None}, "runtime")
    with StopRequest() as stop, Watchdog(runtime.hang_s, context.work) as watchdog:
        job = _prepare(context, runtime, stop, watchdog)
        if job.first_step < job.config.phase.end_step:
            if stop:
                raise Preempted(f"train/{context.name}: {stop.received} before the first step; start it again")
            try:
                _train(job)
            except (Preempted, NonFiniteTraining, ReplicasDiffer):
                if not context.is_main:
                    stop.let_main_end_first()
                raise
        watchdog.beat()
        return _finish(job)


def _prepare(context: StageContext, runtime: Runtime, stop: StopRequest, watchdog: Watchdog) -> TrainingJob:
    where = f"train/{context.name}"
    config = context.settings(TrainConfig)
    device = join_world(set_up_torch(runtime.device, runtime.kernels, runtime.threads))
    dataset = open_dataset(context.given(DATA_ROLE).work)
    model = build_model(config, dataset.vocab_size, where)
    apply_runtime(model, runtime, where)
    identity = {"stage": context.stage, "fingerprint": context.fingerprint, "config": context.config}
    store = CheckpointStore(context.work, identity, context.journal, config.phase.keep)
    start = gather_objects(_find_start(context, config, store) if context.is_main else None)[0]
    job = TrainingJob(context, config, runtime, device, dataset, model, store, start, stop, watchdog)
    if context.is_main:
        store.require_space(sum(3 * tensor.nbytes for tensor in model_tensors(model).values()))
        path, step = context.journal.path, job.first_step
        if path is not None and any(point.step > step for point in journal.read(path)):
            context.journal.rewind(step)  # training repeats the steps after the checkpoint; they must not count twice
    return job


def _train(job: TrainingJob) -> None:
    config, context = job.config, job.context
    if config.phase.couples_sequences and job.layout.micro_batch_size < config.batch_size:
        raise BatchSizeError(
            f"train/{context.name}: solver.stop: batch needs all {config.batch_size} sequences in one micro-batch "
            f"on one device, not {job.layout.micro_batch_size}; drop micro_batch_size, use one process, or stop: "
            "sequence"
        )
    context.log.info("%s", _headline(job))
    context.journal.event("training_started", step=job.first_step)
    reached = TrainingLoop(job).run()
    if reached < config.phase.end_step:
        raise Preempted(
            f"train/{context.name}: stopped by {job.stop.received} after step {reached}, which is committed; start it "
            "again"
        )


def _finish(job: TrainingJob) -> StageResult:
    """Write the model, final training state and summary on rank 0, from the checkpoint at the end of the phase.

    The saved model has the solver settings of the evaluation protocol. Other ranks wait until rank 0 has finished.
    Raises: TrainInputError on rank 0.
    """
    context, store, phase = job.context, job.store, job.config.phase
    kept = [f"{KEPT_DIR}/{step_name(step)}" for step in phase.keep]
    # If config.json is beside the manifest, `from_pretrained` accepts the run directory.
    beside = [f"{DECLARED}/{CONFIG_FILE}"] if isinstance(job.model, ImplicitPreTrainedModel) else []
    files = [MODEL_DIR, "checkpoint", *kept, SUMMARY_FILE, *beside]
    if not context.is_main:
        wait_for_all()
        return StageResult(files, {})
    final = store.newest()
    if final is None or final.global_step != phase.end_step:
        raise TrainInputError(f"{store.final}: the state at the end of the phase was damaged; start again")
    load_model(job.model, final.model(), str(final.path))
    summary = _summary(job, final)
    solver = solver_of(job.model)
    if solver is not None:
        model: Any = job.model
        model.solver = replace(solver, **context.kinds.tasks[job.config.task].protocol)
    with new_directory(context.work / MODEL_DIR) as directory:
        faults.point("train.before_model")
        job.model.save_pretrained(directory)
        (directory / model_card.FILE_NAME).write_text(
            model_card.training_card(context, job.model, summary), encoding="utf-8"
        )
    faults.point("train.before_summary")
    write_json(context.work / SUMMARY_FILE, summary)
    for path in beside:
        (context.work / DECLARED).mkdir(exist_ok=True)
        shutil.copyfile(context.work / MODEL_DIR / CONFIG_FILE, context.work / path)
    store.finish(final)
    context.log.info("%s: phase finished at step %d, %s", context.name, final.global_step, shown(summary["metrics"]))
    wait_for_all()
    return StageResult(files, summary)


def _summary(job: TrainingJob, final: Checkpoint) -> dict[str, Any]:
    """Return the summary, which does not depend on runtime settings; `metrics` has means over RECENT_STEPS steps."""
    metrics = StepMetrics(job.context.kinds.tasks[job.config.task])
    metrics.load_state(final.state["metrics"])
    return {
        "phase": job.config.phase.name,
        "global_step": final.global_step,
        "tokens": metrics.totals.tokens,
        "flops": metrics.totals.flops,
        "num_parameters": job.model.num_parameters(),
        "metrics": metrics.recent(),
        "data": job.context.inputs[DATA_ROLE].manifest.config,
    }


def _headline(job: TrainingJob) -> str:
    phase, layout = job.config.phase, job.layout
    how = "explicit" if phase.solver is None else phase.solver.mode
    sharding = ", optimizer states sharded" if job.shards_optimizer else ""
    return (
        f"{job.context.name}: steps {job.first_step} to {phase.end_step}, {how}, "
        f"{job.model.num_parameters():,} parameters, "
        f"{layout.batch_size} x {job.dataset.length} tokens a step in {layout.accumulation_steps} micro-batch(es) on "
        f"{layout.world_size} {job.device.type}{sharding}, {job.config.precision}, {torch.get_num_threads()} threads"
    )


def _find_start(context: StageContext, config: TrainConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return this run's newest checkpoint, or else the checkpoint of the input phase from which this phase starts.

    Return None for a first phase without a checkpoint. Raises: TrainInputError, ForeignCheckpoint.
    """
    own = store.newest()
    if own is not None:
        context.log.info("going on from %s, step %d", own.path.name, own.global_step)
        return own
    return _earlier_phase(context, config) if config.phase.index > 0 else None


def _earlier_phase(context: StageContext, config: TrainConfig) -> Checkpoint:
    """Return the checkpoint of the input phase `start`: its final one, or an earlier one that it kept.

    Raises: TrainInputError.
    """
    source = context.given(START_ROLE)
    phase = source.manifest.config["phase"]
    wanted, end = config.phase.start_step, phase["end_step"]
    path = source.work / ("checkpoint" if wanted == end else f"{KEPT_DIR}/{step_name(wanted)}")
    try:
        start = read_checkpoint(path)
    except CorruptCheckpoint as error:
        kept = [*phase.get("keep", ()), end]
        if wanted in kept:
            manifest = shlex.quote(str(source.dir / "manifest.json"))
            what = f"is missing or damaged; type `rm -f {manifest}` and run the workflow again"
        else:
            has = ", ".join(map(str, kept))
            what = f"was not kept: {phase['name']} has the states after {has}; add {wanted} to its `keep`"
        raise TrainInputError(f"{path}: the state where phase {config.phase.name} starts {what}") from error
    context.log.info("starting from %s, step %d", source.manifest.name, start.global_step)
    return start
