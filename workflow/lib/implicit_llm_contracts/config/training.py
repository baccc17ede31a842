"""Define the settings of a training job: those of its identity, and those of its runtime."""

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
    """The learning rate as a function of the global step; fractions are shares of the curriculum's total_steps."""

    kind: Literal["linear", "warmup_stable_decay"]
    peak_learning_rate: Positive
    final_learning_rate: float
    warmup_fraction: Fraction
    decay_fraction: Annotated[Fraction | None, UNLESS_DEFAULT] = None  # only warmup_stable_decay has and requires it

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
    """The settings of AdamW. `max_grad_norm`: clips the norm of all gradients together."""

    beta1: BelowOne
    beta2: BelowOne
    eps: Positive
    weight_decay: NotNegative
    max_grad_norm: Positive


@dataclass(frozen=True)
class PhaseConfig:
    """A phase of a curriculum: the global steps from start_step (inclusive) to end_step (exclusive).

    solver: None for explicit models.
    keep: the global steps after which the checkpoint is stored permanently, so that other phases can start there.
    state_passing: the number of sequences in the longest chains, see implicit_llm/training/state_passing.py. In a
        chain, each sequence starts in the state of the one before it. None: every sequence starts in the empty state.
    restart_when_wrong: whether a chain also restarts from the empty state after a wrong last prediction.
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
        every = self.state_passing or 1
        amid = next((step for step in self.keep if (step - start) % every), None)
        refuse_if(
            amid is not None,
            f"keep: at step {amid} some sequences continue a carried state, which a checkpoint lacks; give a step "
            f"after which all restart, as after every {every} steps of the phase, or remove it",
        )

    @property
    def couples_sequences(self) -> bool:
        """Whether the solver stops for a whole micro-batch at once, so that the micro-batch size changes the result."""
        return self.solver is not None and self.solver.mode == "fixed_point" and self.solver.stop == "batch"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A training recipe in workflow/config/tasks/<name>.yaml. Only the key `reduction` has a default.

    `labels`: aligned compares the logits of a token with its own label, next_token with the label after it.
    `total_steps`: the optimizer steps of the whole curriculum. `batch_size`: sequences per step, over all devices.
    `precision`: the precision of matrix products; weights and optimizer are always fp32, and fp16 scales its gradients.
    `reduction`: the precision in which gradients are sent between processes and summed.
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
    """The training of one phase of a curriculum.

    model: the fields of a Hugging Face configuration with model_type and without solver, and "package", whose import
        registers the type. For a trained model it is {"pretrained": folder}, with an optional "sha256", which maps
        files to the digests that they must have. For a model on the hub it is {"pretrained": name, "revision": commit}.
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
    """The settings that may differ between two runs with the same result.

    micro_batch_size: sequences of one forward pass on one device; None for all sequences of the process at once.
    save_every_s: seconds between checkpoints, more if saving is slow, see save_schedule.py; None saves none by time.
    save_steps: steps between further checkpoints; None saves none by steps.
    grace_s: seconds between the stop signal and the kill; the log warns if a save may come too late.
    hang_s: seconds without progress after which a process writes its stacks and ends; 0 waits forever.
    gradient_checkpointing: recompute activations in the backward pass to save memory; the numbers are the same.
    shard_optimizer: each of several processes stores a part of AdamW's moments; the numbers are the same.
    cuda_graphs: on a GPU, start the thousands of kernels of a training pass by one call, if the shapes allow it.
    progress: log lines at growing intervals, or a bar; auto shows the bar on a terminal outside of Snakemake.
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
