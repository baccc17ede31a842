"""The Hugging Face Trainer with what a curriculum phase needs: own loss, batches, schedule, metrics and checkpoints.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from implicit_llm.labels import IGNORED_LABEL
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.training.batches import MicroBatches
from implicit_llm.training.distributed import gather_objects, total_over_ranks, world_size
from implicit_llm.training.job import TrainingJob
from implicit_llm.training.metrics import GRAD_NORM, LOSS, StepMetrics
from implicit_llm.training.mode_gap import is_due, mode_gap, trained_logits
from implicit_llm.training.non_finite import SolverFailures, UpdateGuard, judge, non_finite_error
from implicit_llm.training.operations.checkpoint import Checkpoint, TrainingState
from implicit_llm.training.operations.speed import SpeedMeter
from implicit_llm.training.optimizer import build_optimizer
from implicit_llm.training.precision import MAX_SKIPPED_IN_A_ROW, autocast, load_scaler, make_scaler, scaler_values
from implicit_llm.training.replicas import require_equal_replicas
from implicit_llm.training.sampler import StepSampler
from implicit_llm.training.schedule import GlobalStepSchedule, learning_rate
from implicit_llm.training.spectral_radius import mean_spectral_radius
from implicit_llm.training.state import (
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from implicit_llm.training.totals import StepCost
from implicit_llm_contracts.runs import faults


class PhaseTrainer(Trainer):
    """Trains from a checkpoint (or from nothing) to the end of the phase; `fit` is the entry."""

    model: PreTrainedModel
    optimizer: Any  # None until create_optimizer
    lr_scheduler: Any
    loss_is_scaled_for_ga = True  # compute_loss divides by the labels of the whole global batch

    def __init__(
        self, model: PreTrainedModel, args: TrainingArguments, job: TrainingJob, callbacks: list[TrainerCallback]
    ) -> None:
        args.per_device_train_batch_size = job.layout.micro_batch_size
        args.gradient_accumulation_steps = job.layout.accumulation_steps
        super().__init__(model=model, args=args, callbacks=callbacks)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # the same, for versions without the attribute above
        self.job, config = job, job.config
        self.accelerator.scaler = make_scaler(args.device.type, config.precision)  # it scales losses and wraps updates
        self.metrics = StepMetrics(config.task, StepCost(model, config.batch_size, job.dataset.length))
        self.speed = SpeedMeter(config.precision, job.runtime, args.device, world_size())
        self.sampler = StepSampler(len(job.dataset), config.batch_size, config.seed)
        self._is_implicit = getattr(model, "solver", None) is not None
        self._start: Checkpoint | None = None
        self._guard: UpdateGuard | None = None
        self._solver_failures = SolverFailures(model) if world_size() > 1 else None

    def fit(self, start: Checkpoint | None) -> int:
        """Train; return the global step reached, less than the end of the phase after a stop request."""
        self._start = start
        if start is not None:
            self.metrics.load_state(start.metrics)
            if start.global_step == self.job.config.phase.start_step:
                self.metrics.start_phase()
        self.speed.start(self.metrics.totals)
        self.train(resume_from_checkpoint=None if start is None else str(start.path))
        return self.state.global_step

    @property
    def first_step(self) -> int:
        """Steps that were finished before `fit`."""
        return 0 if self._start is None else self._start.global_step

    # ---- data, loss, optimizer

    def get_train_dataloader(self) -> Any:
        job = self.job
        return MicroBatches(job.dataset, self.sampler, job.layout, job.config.labels, self.first_step, self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int | Tensor:
        total = total_over_ranks(sum(batch["num_labels"] for batch in batch_samples), device)
        return max(total, 1) if isinstance(total, int) else total.clamp_min(1)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        faults.point("train.micro_step")
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        except FloatingPointError as error:
            raise self._non_finite(self.state.global_step + 1, str(error)) from error

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Cross entropy in fp32 of the logits at each position against the label at that position.

        The sum over a micro-batch is divided by the labels of the global batch, so that accumulation and world size
        change nothing; DDP averages over ranks, hence the factor. A batch without any label has the loss zero.
        """
        labels_BL = inputs["labels"]
        with self._autocast():
            outputs = model(input_ids=inputs["input_ids"], **self._head_options(labels_BL))
        loss = outputs.loss
        if loss is None:  # a model of other makers, or one whose solver failed
            loss = F.cross_entropy(
                outputs.logits.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
        loss = loss * (world_size() / num_items_in_batch)
        is_first = self.metrics.is_between_steps  # of the step's micro-batches
        if self._is_implicit and is_first and is_due(self.state.global_step + 1, self.job.config.total_steps):
            self._look_at_fixed_point(inputs, outputs)
        self.metrics.add(loss, outputs.logits, labels_BL, getattr(outputs, "solver_stats", None))
        return (loss, outputs) if return_outputs else loss

    def _head_options(self, labels_BL: Tensor) -> dict[str, Any]:
        """Our models give the summed loss; where no accuracy is measured without logits, which may be large."""
        if not isinstance(self.model, ImplicitForCausalLM):
            return {}
        options = {"labels": labels_BL, "aligned": True, "num_items_in_batch": 1}
        return options | {"return_logits": self.metrics.measures_accuracy}

    def _look_at_fixed_point(self, inputs: dict[str, Any], outputs: Any) -> None:
        failures = self._solver_failures
        message = None if failures is None else failures.message
        gap = mode_gap(self.model, inputs, trained_logits(self.model, outputs, self._autocast()), self._autocast())
        radius = mean_spectral_radius(cast("ImplicitForCausalLM", self.model), inputs, self._autocast())
        self.metrics.add_occasional(mode_gap=gap, spectral_radius=radius)
        if failures is not None:
            failures.message = message  # a failure of the evaluation is no failure of the step

    def _autocast(self) -> Any:
        return autocast(self.args.device.type, self.job.config.precision)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.job.config.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.lr_scheduler is None:
            config = self.job.config
            if self.accelerator.scaler is None:
                # Accelerate has wrapped the optimizer by now, for a gradient scaler that bf16 and fp32 do not need; it
                # looks for an optional package in the file system every time, longer than the update takes on a CPU.
                self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self.lr_scheduler = GlobalStepSchedule(self.optimizer, config.schedule, config.total_steps, self.first_step)
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        # The one place between the backward pass and the update that knows both loss and gradient.
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer.optimizer)
            self.lr_scheduler.go_to(self.state.global_step)  # the Trainer forgets it when an update is left out
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.args.max_grad_norm)
        loss_and_norm = self.metrics.close_step(norm)
        if self._guard is None:
            self._guard = UpdateGuard(self.optimizer, self.args.device, may_overflow=scaler is not None)
        if not self._guard.is_good(loss_and_norm):
            self._read_metrics(self.state.global_step + 1)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # the default walks over all parameters in every step

    # ---- metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the metrics of the steps since the last report; the Trainer's own numbers are left out."""
        if "loss" not in logs:
            return  # the Trainer's summary at the end
        step, config, totals = self.state.global_step, self.job.config, self.metrics.totals
        self._read_metrics(step)
        values = self.metrics.drain()
        values["learning_rate"] = learning_rate(config.schedule, step - 1, config.total_steps)
        values |= {"tokens": totals.tokens, "flops": totals.flops}
        if config.precision == "fp16":
            values["skipped_updates"] = totals.skipped_updates
        values |= self.speed.read(totals)
        if self.is_world_process_zero():
            self.job.report(step, values)

    def _read_metrics(self, step: int) -> None:
        """Bring the metrics of all closed steps, the last of them `step`, to the host.

        Raises: NonFiniteTraining for the first of them whose loss or gradient is not finite; an fp16 gradient that
            overflowed counts only after many in a row.
        """
        in_a_row = self.metrics.totals.skipped_in_a_row
        rows = self.metrics.pull()
        losses_and_norms = [(row[LOSS], row[GRAD_NORM]) for row in rows]
        allowed = 0 if self.accelerator.scaler is None else MAX_SKIPPED_IN_A_ROW
        skipped, bad = judge(losses_and_norms, step - len(rows) + 1, allowed, in_a_row)
        if bad is not None:
            raise self._non_finite(bad[0], self._reason(bad[1]))
        if self.is_world_process_zero() and rows:
            self.job.observe(step, [self.metrics.named(row) for row in rows])
            if skipped:
                self.job.on_skipped(skipped)

    def _reason(self, what: str) -> str:
        """What a rank's solver said, or else `what`. Collective."""
        if self._solver_failures is None:
            return what
        messages = gather_objects(self._solver_failures.message)
        return next((f"rank {rank}: {message}" for rank, message in enumerate(messages) if message), what)

    def _non_finite(self, step: int, what: str) -> Exception:
        indices, recent = self.sampler.indices(step - 1), self.metrics.recent_rows()
        return non_finite_error(self.job.name, step, what, indices, recent, self.job.work)

    # ---- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._read_metrics(self.state.global_step)
        require_equal_replicas(self.model, self.job.name, self.state.global_step)
        random = gather_objects(random_state())
        if not self.is_world_process_zero():
            return
        self.job.commit(
            TrainingState(
                global_step=self.state.global_step,
                identity=self.job.identity,
                model=model_tensors(self.model),
                optimizer=optimizer_tensors(self.optimizer, self.model),
                random=random,
                metrics=self.metrics.state(),
                scaler=scaler_values(self.accelerator.scaler),
            )
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert self._start is not None
        load_model(self.model if model is None else model, self._start.model(), str(self._start.path))

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        # The Trainer's own state file holds run-time settings; all that counts here is the step.
        progress = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        self.state.global_step = self.first_step
        return progress

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._start is not None:
            load_optimizer(self.optimizer, self.model, self._start.optimizer(), str(self._start.path))
            load_scaler(self.accelerator.scaler, self._start.scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        found = None if self._start is None else self._start.random(self.args.process_index)
        if found is not None:
            set_random_state(*found)
