"""What a training job is (identity) and how it is run (runtime)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import refuse_if

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the global step; fractions are shares of the curriculum's total_steps."""

    kind: Literal["linear", "warmup_stable_decay"]
    peak_learning_rate: float
    final_learning_rate: float
    warmup_fraction: float
    decay_fraction: float | None = None  # of warmup_stable_decay, which needs it

    def __post_init__(self) -> None:
        refuse_if(not self.peak_learning_rate > 0, f"peak_learning_rate: {self.peak_learning_rate} is not above 0")
        refuse_if(
            not 0 <= self.final_learning_rate <= self.peak_learning_rate,
            f"final_learning_rate: {self.final_learning_rate} is not between 0 and peak_learning_rate",
        )
        refuse_if(
            (self.kind == "warmup_stable_decay") != (self.decay_fraction is not None),
            "decay_fraction: belongs to kind warmup_stable_decay and only to it; add or remove the key",
        )
        refuse_if(
            self.decay_fraction is not None and not 0 < self.decay_fraction <= 1,
            f"decay_fraction: {self.decay_fraction} is not in (0, 1]",
        )
        refuse_if(
            not 0 <= self.warmup_fraction <= 1 - (self.decay_fraction or 0.0),
            f"warmup_fraction: {self.warmup_fraction} is not in [0, 1 - decay_fraction]",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; `max_grad_norm` clips the norm over all gradients."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        for key in ("beta1", "beta2"):
            refuse_if(not 0 <= getattr(self, key) < 1, f"{key}: {getattr(self, key)} is not in [0, 1)")
        for key in ("eps", "max_grad_norm"):
            refuse_if(not getattr(self, key) > 0, f"{key}: {getattr(self, key)} is not above 0")
        refuse_if(not self.weight_decay >= 0, f"weight_decay: {self.weight_decay} is below 0")


@dataclass(frozen=True)
class PhaseConfig:
    """Global steps start_step (inclusive) to end_step (exclusive); `solver` is None for explicit models.

    keep: numbers of finished steps whose checkpoints stay, so that other phases can start there.
    """

    name: str
    index: int
    start_step: int
    end_step: int
    solver: SolverConfig | None
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        refuse_if(
            not 0 <= self.start_step < self.end_step,
            f"start_step {self.start_step} and end_step {self.end_step} do not enclose any step",
        )
        refuse_if(
            (self.index == 0) != (self.start_step == 0),
            f"start_step: the phase with index {self.index} cannot start at step {self.start_step}",
        )
        for step in self.keep:
            refuse_if(
                not self.start_step < step <= self.end_step,
                f"keep: {step} is not above {self.start_step} and at most {self.end_step}",
            )
        refuse_if(list(self.keep) != sorted(set(self.keep)), f"keep: {list(self.keep)} are not in order, each once")

    @property
    def couples_sequences(self) -> bool:
        """Whether the solver stops for a whole micro-batch at once, so that its size changes the result."""
        return self.solver is not None and self.solver.mode == "fixed_point" and self.solver.stop == "batch"


@dataclass(frozen=True)
class TrainConfig:
    """Identity of one phase. `batch_size` counts sequences of one optimizer step over all devices.

    model: fields of a Hugging Face configuration with model_type and without solver, and "package", which is imported
        to make the type known; or {"pretrained": folder}, with
        sha256 by file as "sha256" where it is to be compared; or {"pretrained": name, "revision": commit} of the hub.
    precision: of the matrix products; weights and optimizer are fp32 in any case, fp16 scales its gradients.
    """

    task: str
    labels: Literal["aligned", "next_token"]
    model: dict[str, Any]
    phase: PhaseConfig
    total_steps: int
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    batch_size: int
    precision: Literal["fp32", "bf16", "fp16"]
    seed: int

    def __post_init__(self) -> None:
        refuse_if(self.task not in TASKS, f"task: {self.task!r} is unknown; {nearest(self.task, TASKS)}")
        refuse_if(self.batch_size < 1, f"batch_size: {self.batch_size} is below 1")
        refuse_if(
            self.phase.end_step > self.total_steps,
            f"total_steps: {self.total_steps} is less than phase.end_step {self.phase.end_step}",
        )
        refuse_if(not 0 <= self.seed < 2**32, f"seed: {self.seed} is not in 0..{2**32 - 1}")
        refuse_if(
            ("model_type" in self.model) == ("pretrained" in self.model),
            "model: needs either model_type with its fields, or pretrained",
        )
        refuse_if(
            "revision" in self.model and not _COMMIT.fullmatch(str(self.model["revision"])),
            f"model.revision: {self.model.get('revision')!r} is no commit; give its 40 lower-case hexadecimal digits",
        )
        refuse_if("solver" in self.model, "model.solver: belongs to the phase; move it to phase.solver")


@dataclass(frozen=True)
class Runtime:
    """What may differ between two runs of the same result.

    micro_batch_size: sequences of one forward pass on one device; None takes the whole batch at once.
    save_every_s, save_steps: a checkpoint is committed after so many seconds (more where saving takes long, see
        save_schedule.py), and at multiples of so many steps.
    grace_s: time between the stop signal and the kill; a save that takes longer is warned of.
    hang_s: a process without progress for so long is ended, with its stacks; 0 waits for ever.
    gradient_checkpointing: compute activations again in the backward pass, for less memory; the numbers are the same.
    cuda_graphs: on a GPU, start the thousands of kernels of a training pass by one call, where its shapes allow it.
    alarm_*: the solver's health is warned of when, as a mean over the last alarm_window_steps, more than this share of
        the tokens is not converged, or the largest residual is above this one; None for no such alarm.
    progress: log lines at growing intervals, or a bar; auto takes the bar on a terminal outside of Snakemake.
    resume: run directory or checkpoint of the same identity to take up when this one is further back.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    micro_batch_size: int | None = None
    save_every_s: float | None = 60.0
    save_steps: int | None = None
    log_every_steps: int = 10
    tf32: bool = False
    kernels: Literal["auto", "torch", "triton"] = "auto"
    gradient_checkpointing: bool = False
    cuda_graphs: bool = True
    # Word-problem models that learn reach 0.65 and 0.61 on the way; with 8 iterations for 256 tokens the share is 0.99.
    alarm_unconverged_share: float | None = 0.9
    alarm_residual: float | None = 0.8
    alarm_window_steps: int = 200
    progress: Literal["auto", "bar", "log"] = "auto"
    grace_s: float | None = None
    hang_s: float = 1800.0
    resume: Path | None = None

    def __post_init__(self) -> None:
        for key in ("threads", "micro_batch_size", "save_steps", "log_every_steps", "alarm_window_steps"):
            value = getattr(self, key)
            refuse_if(value is not None and value < 1, f"{key}: {value} is below 1")
        for key in ("save_every_s", "grace_s", "hang_s", "alarm_unconverged_share", "alarm_residual"):
            value = getattr(self, key)
            refuse_if(value is not None and not value >= 0, f"{key}: {value} is below 0")
