"""What a training job is (identity) and how it is run (runtime)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT, Only
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.values import COMMIT, BatchSize, BelowOne, Count, Fraction, Number, Seed, Steps
from implicit_llm_contracts.errors import refuse_if

Positive = Annotated[float, Only(lambda value: value > 0, "a number above 0")]
NotNegative = Annotated[float, Only(lambda value: value >= 0, "a number of at least 0")]
Kernels = Literal["auto", "torch", "triton", "mamba_ssm"]  # see implicit_llm/kernels/selection.py


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the global step; fractions are shares of the curriculum's total_steps."""

    kind: Literal["linear", "warmup_stable_decay"]
    peak_learning_rate: Positive
    final_learning_rate: float
    warmup_fraction: Fraction
    decay_fraction: Annotated[Fraction | None, UNLESS_DEFAULT] = None  # of warmup_stable_decay, which needs it

    def __post_init__(self) -> None:
        refuse_if(
            not 0 <= self.final_learning_rate <= self.peak_learning_rate,
            f"final_learning_rate: {self.final_learning_rate} is not between 0 and peak_learning_rate",
        )
        refuse_if(
            (self.kind == "warmup_stable_decay") != (self.decay_fraction is not None),
            "decay_fraction: belongs to kind warmup_stable_decay and only to it; add or remove the key",
        )
        refuse_if(
            self.warmup_fraction > 1 - (self.decay_fraction or 0.0),
            f"warmup_fraction: {self.warmup_fraction} is not in [0, 1 - decay_fraction]",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; `max_grad_norm` clips the norm over all gradients."""

    beta1: BelowOne
    beta2: BelowOne
    eps: Positive
    weight_decay: NotNegative
    max_grad_norm: Positive


@dataclass(frozen=True)
class PhaseConfig:
    """Global steps start_step (inclusive) to end_step (exclusive); `solver` is None for explicit models.

    keep: numbers of finished steps whose checkpoints stay, so that other phases can start there.
    state_passing: for so many steps in a row a sequence starts in the state of the one before it, see
        implicit_llm/training/state_passing.py; None for the empty state each time.
    restart_when_wrong: after a wrong last answer, a sequence starts in the empty state instead.
    """

    name: str
    index: int
    start_step: Number
    end_step: int
    solver: SolverConfig | None
    keep: Annotated[tuple[int, ...], UNLESS_DEFAULT] = ()
    state_passing: Annotated[Count | None, UNLESS_DEFAULT] = None
    restart_when_wrong: Annotated[bool, UNLESS_DEFAULT] = True

    def __post_init__(self) -> None:
        start, end = self.start_step, self.end_step
        refuse_if(end <= start, f"end_step: {end} is out of range; give more than start_step, {start}")

    @property
    def couples_sequences(self) -> bool:
        """Whether the solver stops for a whole micro-batch at once, so that its size changes the result."""
        return self.solver is not None and self.solver.mode == "fixed_point" and self.solver.stop == "batch"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """workflow/config/tasks/<name>.yaml: a training recipe. The file shows every value but `reduction`.

    `labels`: aligned compares the logits of a token with its own label, next_token with the label after it.
    `total_steps`: optimizer steps of the whole curriculum. `batch_size`: sequences of one step, over all devices.
    `precision`: of the matrix products; weights and optimizer are fp32 in any case, fp16 scales its gradients.
    `reduction`: in what gradients are sent between processes and summed.
    """

    task: str
    labels: Literal["aligned", "next_token"]
    total_steps: Steps
    batch_size: BatchSize
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    reduction: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TaskConfig):
    """One phase of a curriculum.

    model: fields of a Hugging Face configuration with model_type and without solver, and "package", which is imported
        to make the type known; or {"pretrained": folder}, with
        sha256 by file as "sha256" where it is to be compared; or {"pretrained": name, "revision": commit} of the hub.
    """

    model: dict[str, Any]
    phase: PhaseConfig
    seed: Seed

    def __post_init__(self) -> None:
        end, revision = self.phase.end_step, self.model.get("revision")
        total = self.total_steps
        refuse_if(total < end, f"total_steps: {total} is out of range; give at least phase.end_step, {end}")
        refuse_if(
            self.phase.state_passing is not None and self.task != "word_problem",
            f"phase.state_passing: words alone can be joined, not the sequences of {self.task}; remove the key",
        )
        refuse_if(
            revision is not None and not COMMIT.accepts(str(revision)),
            f"model.revision: {revision!r} is no commit; give its 40 lower-case hexadecimal digits",
        )


@dataclass(frozen=True)
class Runtime:
    """What may differ between two runs of the same result.

    micro_batch_size: sequences of one forward pass on one device; None takes the whole batch at once.
    save_every_s, save_steps: a checkpoint is committed after so many seconds (more where saving takes long, see
        save_schedule.py), and at multiples of so many steps.
    grace_s: time between the stop signal and the kill; a save that takes longer is warned of.
    hang_s: a process without progress for so long is ended, with its stacks; 0 waits for ever.
    gradient_checkpointing: compute activations again in the backward pass, for less memory; the numbers are the same.
    shard_optimizer: of several processes each keeps a part of AdamW's moments; the numbers are the same.
    cuda_graphs: on a GPU, start the thousands of kernels of a training pass by one call, where its shapes allow it.
    progress: log lines at growing intervals, or a bar; auto takes the bar on a terminal outside of Snakemake.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = None
    micro_batch_size: BatchSize | None = None
    save_every_s: NotNegative | None = 60.0
    save_steps: Count | None = None
    log_every_steps: Count = 10
    kernels: Kernels = "auto"
    gradient_checkpointing: bool = False
    shard_optimizer: bool = False
    cuda_graphs: bool = True
    progress: Literal["auto", "bar", "log"] = "auto"
    grace_s: NotNegative | None = None
    hang_s: NotNegative = 1800.0
