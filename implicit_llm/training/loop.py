"""Train a curriculum phase step by step, log its metrics, save checkpoints, and stop on request.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, set_seed

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.training.batches import BatchLayout, StepSampler, micro_batches
from implicit_llm.training.distributed import (
    gather_objects,
    is_main,
    rank,
    require_equal_replicas,
    total_over_ranks,
    world_size,
)
from implicit_llm.training.gradients import GradientReducer
from implicit_llm.training.metrics import StepMetrics, cost_per_token, is_due, look_at_fixed_point
from implicit_llm.training.non_finite import NonFiniteTraining, SolverFailures, UpdateGuard, judge
from implicit_llm.training.operations.checkpoint import Checkpoint, CheckpointStore, TrainingState
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule
from implicit_llm.training.operations.status import SolverAlarm, SpeedMeter, shown
from implicit_llm.training.operations.watchdog import Watchdog
from implicit_llm.training.optimizer import build_optimizer, learning_rate, local_part
from implicit_llm.training.state import (
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from implicit_llm.training.state_passing import StatePassing
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.shards import IGNORED_LABEL, TokenDataset
from implicit_llm_jobs.progress import ProgressLog

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The fp16 loss scale starts at 2**16 and halves with each overflow. After this many overflows in a row, it is so small
# that it cannot be their cause, and training stops.
MAX_SKIPPED_IN_A_ROW = 24
NON_FINITE_REPORT = "non_finite.json"


@dataclass(frozen=True)
class TrainingJob:
    """A phase that is ready to train from the checkpoint `start`, or with the current weights if `start` is None.

    A stop signal that `stop` receives ends the phase early. Only rank 0 writes to the context's journal.
    """

    context: StageContext
    config: TrainConfig
    runtime: Runtime
    device: torch.device
    dataset: TokenDataset
    model: PreTrainedModel
    store: CheckpointStore
    start: Checkpoint | None
    stop: StopRequest
    watchdog: Watchdog

    @property
    def first_step(self) -> int:
        """The number of steps of the whole curriculum that were finished before this job."""
        return 0 if self.start is None else self.start.global_step

    @cached_property
    def layout(self) -> BatchLayout:
        return BatchLayout.choose(self.config.batch_size, world_size(), rank(), self.runtime.micro_batch_size)

    @property
    def shards_optimizer(self) -> bool:
        """Whether each process stores only a part of the optimizer's state."""
        return self.runtime.shard_optimizer and world_size() > 1


class TrainingLoop:
    """A loop that trains the job's model to the end of the phase.

    `global_step` counts the finished steps of the whole curriculum.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job, config, model = job, job.config, job.model
        self.global_step = job.first_step
        self.model = model
        cast("nn.Module", model).to(job.device)
        # Dropout must not depend on the random numbers that initialised the weights, and ranks must not share masks.
        set_seed(config.seed + rank())
        self.optimizer = build_optimizer(model, config.optimizer, is_sharded=job.shards_optimizer)
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=config.precision == "fp16")  # otherwise a no-op
        task, length = job.context.kinds.tasks[config.task], job.dataset.length
        self.metrics = StepMetrics(task, config.batch_size * length, cost_per_token(model, length))
        if job.start is not None:
            self._load(job.start)
        self.speed = SpeedMeter(config.precision, job.device, world_size())
        self.journal = job.context.journal
        self._alarm = SolverAlarm(self.journal)
        steps = range(job.first_step, config.phase.end_step)
        self._saves = SaveSchedule(job.runtime, job.stop, steps, job.store, self.journal)
        self._reported: dict[str, float] = {}
        self.sampler = StepSampler(len(job.dataset), config.batch_size, config.seed)
        self._solver_failures = SolverFailures(model) if world_size() > 1 else None
        self._reducer = GradientReducer(model, _DTYPES[config.reduction]) if world_size() > 1 else None
        if isinstance(model, ImplicitForCausalLM) and job.layout.accumulation_steps == 1:
            model.base.runner.reducer = self._reducer
        passes_states = config.phase.state_passing is not None
        self._passing = (
            StatePassing(config.phase, job.dataset.source, job.layout, job.device) if passes_states else None
        )
        self._guard = UpdateGuard(local_part(self.optimizer), job.device, may_overflow=self.scaler.is_enabled())

    def run(self) -> int:
        """Train; return the global step reached, which may be less than the end of the phase after a stop request.

        The state at the returned step is committed. With state passing, saves and stops before the end wait for the
        next step after which all chains restart. Raises: NonFiniteTraining, ReplicasDiffer, StorageError.
        """
        job, end = self.job, self.job.config.phase.end_step
        self.model.train()
        self.speed.start(self.metrics.totals)
        name, shown_as = job.context.name, job.runtime.progress
        progress = ProgressLog(name, "step", end, self.global_step, shown_as) if is_main() else None
        is_stopped = False
        with self._saves:
            while self.global_step < end and not is_stopped:
                indices = self.sampler.indices(self.global_step)
                batches = micro_batches(job.dataset, indices, job.layout, job.config.labels, job.device)
                self.train_step(list(batches))
                step = self.global_step
                may_save = self._passing is None or step == end or self._passing.starts_at(step)
                should_save, is_stopped = self._saves.after_step(step) if may_save else (False, False)
                if step in (1, end) or step % job.runtime.log_every_steps == 0:
                    self.report()
                if should_save:
                    self.save()
                if progress is not None:
                    progress.tell(step, lambda: shown(self._reported))
                job.watchdog.beat()
        return self.global_step

    def train_step(self, batches: list[dict[str, Any]]) -> None:
        """Update the weights once from this rank's micro-batches of a global batch. Collective.

        Raises: NonFiniteTraining; on an accelerator, often only the next `report` or `save` raises it.
        """
        config, step = self.job.config, self.global_step
        rate = learning_rate(config.schedule, step, config.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._passing is not None:
            self._passing.join(batches, step)
        num_labels = max(1, total_over_ranks(sum(batch["num_labels"] for batch in batches)))
        for number, batch in enumerate(batches, start=1):
            faults.point("train.micro_step")
            is_last = number == len(batches)
            try:
                loss, outputs = self.compute_loss(batch, num_labels)
                if number == 1 and is_due(step + 1, config.total_steps):
                    self.probe(batch, outputs)
                del outputs  # its logits are large
                with self._reducer.over_ranks() if self._reducer is not None and is_last else nullcontext():
                    self.scaler.scale(loss).backward()
            except FloatingPointError as error:
                raise self._non_finite(step + 1, str(error)) from error
            self.job.watchdog.beat()
        if not self._guard.is_good(self.metrics.close_step(self.clip_gradients())):
            self._read_metrics(step + 1)  # raises NonFiniteTraining
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.global_step = step + 1

    def compute_loss(self, batch: dict[str, Any], num_labels: int) -> tuple[Tensor, Any]:
        """Return the fp32 cross entropy of the logits and the labels at the same positions, and the model's outputs.

        The sum over a micro-batch is divided by the number of labels of the global batch, so accumulation and world
        size do not change the loss. A batch without any label has the loss zero. The call also adds to the metrics and,
        with state passing, stores the last states.
        """
        labels_BL = batch["labels"]
        with self._autocast():
            outputs = self.model(input_ids=batch["input_ids"], **self._model_options(batch))
        loss = outputs.loss
        if loss is None:  # the model got no labels, or its solver failed
            logits_BV = outputs.logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits_BV, labels_BL.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        loss = loss / num_labels
        if self._passing is not None:
            self._passing.leave(batch, outputs.logits)
        share = loss.detach() * world_size()  # metrics are means over ranks
        stats = getattr(outputs, "solver_stats", None)
        self.metrics.add(share, outputs.logits, labels_BL, stats, batch.get("carried_share"))
        return loss, outputs

    def probe(self, batch: dict[str, Any], outputs: Any) -> None:
        """Add mode_gap and spectral_radius of an implicit model to the metrics, except in a phase with state passing.

        There, sequences start in other states than in evaluation, so the losses are not comparable.
        """
        if solver_of(self.model) is not None and self._passing is None:
            self.metrics.add_occasional(look_at_fixed_point(self.model, batch, outputs, self._autocast()))

    def clip_gradients(self) -> Tensor:
        """Divide the gradients by the loss scale and clip their norm; return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return nn.utils.clip_grad_norm_(trained, self.job.config.optimizer.max_grad_norm)

    def report(self) -> None:
        """Report the metrics of the steps since the last report. Collective. Raises: NonFiniteTraining."""
        step, config, totals = self.global_step, self.job.config, self.metrics.totals
        self._read_metrics(step)
        values = self.metrics.drain()
        values["learning_rate"] = learning_rate(config.schedule, step - 1, config.total_steps)
        values |= {"tokens": totals.tokens, "flops": totals.flops}
        if config.precision == "fp16":
            values["skipped_updates"] = totals.skipped_updates
        values |= self.speed.read(totals)
        if is_main():
            self.journal.metrics(step, values)
            self._reported = values
        self.job.watchdog.beat()

    def save(self) -> None:
        """Commit the training state, if possible in the background. Collective.

        Raises: NonFiniteTraining, ReplicasDiffer, StorageError.
        """
        self._read_metrics(self.global_step)
        require_equal_replicas(self.model, self.job.context.name, self.global_step)
        random, optimizer = gather_objects(random_state()), optimizer_tensors(self.optimizer, self.model)
        if is_main():
            state = TrainingState(
                global_step=self.global_step,
                identity=self.job.store.identity,
                model=model_tensors(self.model),
                optimizer=optimizer,
                random=random,
                metrics=self.metrics.state(),
                scaler=self.scaler.state_dict() or None,  # scales are powers of two, so JSON rounds nothing
            )
            self._saves.commit(state)
        self.job.watchdog.beat()

    def _load(self, start: Checkpoint) -> None:
        load_model(self.model, start.model(), str(start.path))
        load_optimizer(self.optimizer, self.model, start.optimizer(), str(start.path))
        if start.state["scaler"] is not None:  # only a checkpoint of fp16 training has a scale
            self.scaler.load_state_dict(start.state["scaler"])
        self.metrics.load_state(start.state["metrics"])
        if start.global_step == self.job.config.phase.start_step:
            self.metrics.start_phase()
        found = start.random(rank())
        if found is not None:
            set_random_state(*found)

    def _model_options(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the model in a training pass.

        With them, an ImplicitForCausalLM returns the loss summed over the labels. It returns the logits, which are
        large, only if the task has an accuracy.
        """
        options = {} if self._passing is None else {"past_key_values": batch["chains"].cache}
        if isinstance(self.model, ImplicitForCausalLM):
            options |= {"labels": batch["labels"], "aligned": True, "num_items_in_batch": 1}
            options["return_logits"] = self.metrics.measures_accuracy
        elif hasattr(self.model.config, "use_cache"):
            options["use_cache"] = False
        return options

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes matrix products in the config's precision."""
        precision = self.job.config.precision
        return nullcontext() if precision == "fp32" else torch.autocast(self.job.device.type, _DTYPES[precision])

    def _read_metrics(self, step: int) -> None:
        """Read and check the metrics of all closed steps up to `step`; log alarms and skipped updates. Collective.

        Raises: NonFiniteTraining for the first step whose loss or gradient is not finite; fp16 gradients that
            overflowed count only after MAX_SKIPPED_IN_A_ROW in a row.
        """
        in_a_row = self.metrics.totals.skipped_in_a_row
        rows = self.metrics.pull()
        losses_and_norms = [(row["loss"], row["grad_norm"]) for row in rows]
        allowed = MAX_SKIPPED_IN_A_ROW if self.scaler.is_enabled() else 0
        skipped, bad = judge(losses_and_norms, step - len(rows) + 1, allowed, in_a_row)
        if bad is not None:
            raise self._non_finite(bad[0], self._reason(bad[1]))
        if is_main() and rows:
            self._alarm.observe(step, rows)
            if skipped:
                log.info(
                    "fp16 gradients overflowed at step %s: left out, the scale is halved", ", ".join(map(str, skipped))
                )
                self.journal.event("update_skipped", steps=skipped)

    def _reason(self, what: str) -> str:
        """Return the message of the lowest rank whose solver failed, or `what` if none failed. Collective."""
        if self._solver_failures is None:
            return what
        messages = gather_objects(self._solver_failures.message)
        return next((f"rank {rank}: {message}" for rank, message in enumerate(messages) if message), what)

    def _non_finite(self, step: int, what: str) -> NonFiniteTraining:
        """Write a report of the batch and the last steps; return the error for step number `step`, counted from 1."""
        context, samples = self.job.context, self.sampler.indices(step - 1).tolist()
        report = {"step": step, "what": what, "sample_indices": samples, "recent": self.metrics.recent_rows()}
        write_json(context.work / NON_FINITE_REPORT, report)
        some = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        return NonFiniteTraining(
            f"train/{context.name}: {what} at step {step} (samples {some}; all of them and the steps before in "
            f"{context.work / NON_FINITE_REPORT}), the last checkpoint is from before it; lower "
            "schedule.peak_learning_rate or optimizer.max_grad_norm"
        )
