"""The memory of a GPU that a training step takes, and the micro-batch that fits.

Each GPU holds, in bytes per parameter: weights 4, AdamW's moments 8 (or its part of them), gradients 4, the weights in
the compute precision 2 (none for fp32). The peak is at the beginning of the backward pass: the activations of every
differentiated evaluation of f are there, and those that the first layer's gradient needs once more. Language models
compute their loss without logits. Within 16 % of the measured steps of results/benchmarks/training-step*.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.flops import (
    SSD_CHUNK_LEN,
    differentiated_evaluations,
    llama3_widths,
    num_parameters,
)

GIB = 2**30
WEIGHT_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
STATE_BYTES = WEIGHT_BYTES + MOMENT_BYTES  # of a checkpoint
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class StepMemory:
    """A micro-batch of sequences and what a step with it takes.

    is_recomputed: with gradient checkpointing. is_sharded: with AdamW's moments shared out among the GPUs.
    """

    micro_batch: int
    gib: float
    is_recomputed: bool
    is_sharded: bool

    @property
    def label(self) -> str:
        """The micro-batch with a letter for each of the two."""
        return f"{self.micro_batch}{' r' if self.is_recomputed else ''}{'s' if self.is_sharded else ''}"


@dataclass(frozen=True)
class TrainedModel:
    """Model and solver as in the identity of a training job; `has_logits`: of all tasks but language modelling."""

    model: Mapping[str, Any]
    solver: Mapping[str, Any] | None
    length: int
    precision: str
    has_logits: bool = False

    def step_gib(self, micro_batch: int, *, accumulates: bool, is_recomputed: bool, shards: int = 1) -> float:
        """GiB of a step. accumulates: a step has several micro-batches, so that gradients outlive each of them."""
        model, width, tokens = self.model, BYTES[self.precision], micro_batch * self.length
        cast = 0 if width == 4 else width
        gradient = GRADIENT_BYTES if accumulates else 0
        states = num_parameters(model) * (WEIGHT_BYTES + MOMENT_BYTES / shards + cast + gradient)
        # In fp32 the logits of the loss, their log-softmax and its gradient.
        logits = model.get("vocab_size", 0) * (width + 12) if self.has_logits else 0
        evaluations, layer = differentiated_evaluations(self.solver), layer_activation_bytes(model, width)
        stack = model.get("num_hidden_layers", 0) * layer
        # Recomputed, an evaluation keeps its input z alone; one at a time has its activations.
        kept = 4 * model.get("hidden_size", 0) * evaluations + stack if is_recomputed else evaluations * stack
        return (states + tokens * (logits + kept + layer)) / GIB

    def fitting_step(self, gib: float, sequences: int, gpus: int) -> StepMemory | None:
        """The largest micro-batch that fits into `gib`, of the divisors of a GPU's `sequences` a step.

        If not even one fits, with gradient checkpointing; then with moments sharded over `gpus` too. None if none fits.
        """
        for is_recomputed, shards in ((False, 1), (True, 1), (True, gpus)):
            for micro_batch in (size for size in range(sequences, 0, -1) if sequences % size == 0):
                accumulates = micro_batch < sequences
                needed = self.step_gib(micro_batch, accumulates=accumulates, is_recomputed=is_recomputed, shards=shards)
                if needed <= gib:
                    return StepMemory(micro_batch, needed, is_recomputed, shards > 1)
        return None


def layer_activation_bytes(model: Mapping[str, Any], width: int) -> int:
    """Bytes a token that a layer keeps for its backward pass; `width`: bytes of a number in the compute precision.

    The residual stream is fp32. Mamba2: stream, its norm, in-projection, dt, convolution, the states between chunks,
    scan and gated norm. Llama: two streams and norms, query, key, value, attention's result, and of the MLP gate, up,
    silu and product.
    """
    hidden = model.get("hidden_size", 0)
    if model.get("model_type") == "implicit_mamba2":
        inner = model["expand"] * hidden
        heads, channels = inner // model["head_dim"], inner + 2 * model["n_groups"] * model["state_size"]
        states = inner * model["state_size"] // SSD_CHUNK_LEN
        return 4 * hidden + width * (hidden + inner + 2 * channels + heads + states + 2 * inner) + 8 * heads
    mlp, (query, key) = model.get("intermediate_size") or 4 * hidden, llama3_widths(model)
    return 8 * hidden + width * (3 * hidden + 2 * query + 2 * key + 4 * mlp)
