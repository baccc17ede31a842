"""The memory of a GPU that a training step takes, and the micro-batch that fits.

Without sharding each GPU holds, in bytes a parameter: weights 4, AdamW's moments 8, gradients 4, the weights in the
compute precision 2 (none for fp32). The most is taken when the backward pass begins: activations of every
differentiated evaluation of f are there, and the logits with their gradient; gradients are there from earlier
micro-batches only. Against the 12 steps of results/benchmarks/language-model-steps-h200.json: within 4 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.flops import differentiated_evaluations, llama3_widths, num_parameters
from implicit_llm_workflow.estimates.throughput import BYTES

GIB = 2**30
STATE_BYTES, GRADIENT_BYTES = 12, 4


@dataclass(frozen=True)
class StepMemory:
    """A micro-batch of sequences and what a step with it takes; is_recomputed: with gradient checkpointing."""

    micro_batch: int
    gib: float
    is_recomputed: bool


@dataclass(frozen=True)
class TrainedModel:
    """Whose steps are measured out: model and solver as in the identity of a training job."""

    model: Mapping[str, Any]
    solver: Mapping[str, Any] | None
    length: int
    precision: str


def step_gib(trained: TrainedModel, micro_batch: int, *, accumulates: bool, is_recomputed: bool) -> float:
    """GiB of a step. accumulates: a step has several micro-batches, so that gradients outlive each of them."""
    model, width = trained.model, BYTES[trained.precision]
    tokens = micro_batch * trained.length
    cast = 0 if width == 4 else width
    states = num_parameters(model) * (STATE_BYTES + cast + (GRADIENT_BYTES if accumulates else 0))
    # Logits in the compute precision; in fp32 those of the loss, their log-softmax and its gradient.
    logits = tokens * model.get("vocab_size", 0) * (width + 12)
    evaluations = differentiated_evaluations(trained.solver)
    stack = tokens * model.get("num_hidden_layers", 0) * layer_activation_bytes(model, width)
    # Recomputed, an evaluation keeps its input z alone; one at a time has its activations.
    kept = tokens * 4 * model.get("hidden_size", 0) * evaluations + stack if is_recomputed else evaluations * stack
    return (states + logits + kept) / GIB


def layer_activation_bytes(model: Mapping[str, Any], width: int) -> int:
    """Bytes a token that a layer keeps for its backward pass; `width`: bytes of a number in the compute precision.

    The residual stream is fp32. Mamba2: stream, its norm, in-projection, dt, convolution, scan and gated norm.
    Llama: two streams and norms, query, key, value, attention's result, and of the MLP gate, up, silu and product.
    """
    hidden = model.get("hidden_size", 0)
    if model.get("model_type") == "implicit_mamba2":
        inner = model["expand"] * hidden
        heads, channels = inner // model["head_dim"], inner + 2 * model["n_groups"] * model["state_size"]
        return 4 * hidden + width * (hidden + inner + channels + heads) + 8 * heads + width * (channels + 2 * inner)
    mlp, (query, key) = model.get("intermediate_size") or 4 * hidden, llama3_widths(model)
    return 8 * hidden + width * (3 * hidden + 2 * query + 2 * key + 4 * mlp)


def fitting_step(trained: TrainedModel, gib: float, sequences: int) -> StepMemory | None:
    """The largest micro-batch that fits into `gib`, of the divisors of a GPU's `sequences` a step.

    With gradient checkpointing if not even one sequence fits without. None if none fits.
    """
    for is_recomputed in (False, True):
        for micro_batch in (size for size in range(sequences, 0, -1) if sequences % size == 0):
            needed = step_gib(trained, micro_batch, accumulates=micro_batch < sequences, is_recomputed=is_recomputed)
            if needed <= gib:
                return StepMemory(micro_batch, needed, is_recomputed)
    return None
