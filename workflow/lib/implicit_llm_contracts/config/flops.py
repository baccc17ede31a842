"""Count the floating-point operations of the models per token of a forward pass and of a training step.

The driver estimates the cost of experiments with these counts, and training reports its FLOPs and utilisation with
them, so both numbers can be compared.

The counts include the operations in matrix products and convolutions that the result needs, two for each multiply-add
(an m x k times k x n product is 2 m n k). They exclude element-wise work (norms, activations, rotations, softmax,
decays), the embedding look-up, weight normalisation, and scores that a causal mask removes. They also exclude work of
the implementation alone: zero columns that pad an MLP, recomputed activations, and the solver's residuals.

Shapes: `L` length, `D` model, `I` inner, `H` heads, `P` head width, `G` groups, `N` state, `K` convolution width,
`E` width of the injection, `M` MLP width, `V` vocabulary, `Q` chunk length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.registry import Registry
from implicit_llm_contracts.config.solver import SolverConfig

MAMBA2, LLAMA3 = "implicit_mamba2", "implicit_llama3"
FAMILY_NAMES = {MAMBA2: "Mamba2", LLAMA3: "Llama"}
# The library registers the class of each name.
FAMILIES: Registry[Any] = Registry("model family", dict.fromkeys(FAMILY_NAMES))
# The chunk length of implicit_llm/models/mamba2/ssd.py. Longer chunks, as in mamba_ssm, need more operations.
SSD_CHUNK_LEN = 64
ROUNDING = 1e-3  # relative error of a mean number of f-evaluations in fp32
BACKWARD_FORWARDS = 2  # for y = W x, the gradients of W and of x need as much work as y each


class UncountedModel(ValueError):
    """The configuration does not determine the operations of the model; the message names the missing field."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of a forward pass.

    stack: one evaluation of f, which is all layers. mixing: the part of the stack that multiplies activations with each
    other, in attention or scan, and not with weights. outside: injection and head, once per pass.
    """

    stack: float
    mixing: float
    outside: float


def forward_flops(model: Mapping[str, Any], length: int) -> ForwardFlops:
    """Return the FLOPs per token of a forward pass over sequences of `length` tokens from an empty state.

    model: the fields of a Hugging Face configuration. A model outside the two families counts 2 FLOPs per parameter,
        and only its `num_parameters` is used.
    Raises: UncountedModel.
    """
    match model.get("model_type"):
        case "implicit_mamba2":
            by_weights, mixing = _mamba2_layer(model, length)
        case "implicit_llama3":
            by_weights, mixing = _llama3_layer(model, length)
        case _:
            return ForwardFlops(stack=2.0 * num_parameters(model), mixing=0.0, outside=0.0)
    width, layers = model["hidden_size"], model["num_hidden_layers"]
    injection = 2 * width * _injection_width(model) if model["is_implicit"] else 0
    outside = injection + 2 * width * model["vocab_size"]
    return ForwardFlops(layers * (by_weights + mixing), layers * mixing, outside)


def training_flops(
    model: Mapping[str, Any], length: int, solver: SolverConfig | Mapping[str, Any] | None, f_evaluations: float | None
) -> float:
    """Return the FLOPs per token of a training step: the forward pass and the backward pass of its differentiated part.

    solver: the fields of a `SolverConfig`; None for explicit models. f_evaluations: the mean number of evaluations of f
        per token, including the differentiated ones; None counts the maximum that the solver allows.
    Raises: UncountedModel; ValueError for an implicit model without solver, or for fewer evaluations than the minimum
        of a step.
    Source: Schöne et al. 2025, section 2: unrolled iterations and phantom steps are differentiated, other evaluations
        of f are not.
    """
    forward = forward_flops(model, length)
    if solver is None and model.get("is_implicit"):
        raise ValueError("solver: an implicit model needs one; give the fields of its SolverConfig")
    least, products = last_evaluations(solver), series_products(solver)
    total = max_evaluations(solver) if f_evaluations is None else f_evaluations
    if total < least * (1 - ROUNDING):
        raise ValueError(f"f_evaluations: {total} is less than the {least} that a step always takes")
    of_stack = max(total, least) + BACKWARD_FORWARDS * (least - products)
    in_products = products * (forward.stack + forward.mixing)
    return of_stack * forward.stack + in_products + (1 + BACKWARD_FORWARDS) * forward.outside


def last_evaluations(solver: SolverConfig | Mapping[str, Any] | None) -> int:
    """Return the number of evaluations of f after the solve in a training step; 1 for an explicit model.

    In `mode: unrolled` these are the unrolled iterations. The step differentiates each of these evaluations, except in
    a free pass with `gradient: series`, which differentiates only the last one and has `series_products` in its
    backward pass. The products that solve for an implicit gradient are not counted, because their number depends on the
    data.
    """
    if solver is None:
        return 1
    settings = SolverConfig.of(solver)
    return settings.num_unroll if settings.mode == "unrolled" else settings.steps_after_solve


def series_products(solver: SolverConfig | Mapping[str, Any] | None) -> int:
    """Return the number of products with (df/dz)^T in the backward pass of `gradient: series`; 0 for other gradients.

    For y = W x, such a product computes only the gradient of x, which is as much work as y. For a product of two
    activations it computes the gradients of both, which is twice as much work.
    """
    if solver is None or (settings := SolverConfig.of(solver)).mode == "unrolled" or settings.gradient != "series":
        return 0
    return settings.phantom_steps - 1


def max_evaluations(solver: SolverConfig | Mapping[str, Any] | None, *, passes_states: bool = False) -> int:
    """Return the maximum number of evaluations of f per token in a training step; 1 for an explicit model.

    passes_states: whether the step returns the states after its sequences, for which an implicit model evaluates f
        once more.
    """
    last = last_evaluations(solver)
    if solver is None:
        return last
    last += passes_states
    if (settings := SolverConfig.of(solver)).mode == "unrolled":
        return last
    closing = 0 if settings.block_len is None else 1  # one more f closes a block and returns its state
    return settings.max_iter + closing + last


def num_parameters(model: Mapping[str, Any]) -> int:
    """Return the number of trained parameters, which counts tied weights once.

    For a model outside the two families, return its field `num_parameters`. Raises: UncountedModel.
    """
    width = model.get("hidden_size", 0)
    chosen = model.get("weight_norm")  # weight normalisation has one gain for each output besides the weight
    gains = int(bool(model.get("is_implicit") if chosen is None else chosen))
    match model.get("model_type"):
        case "implicit_mamba2":
            inner, heads, channels = _mamba2_widths(model)
            projections = (width + gains) * _injection_width(model) + (inner + gains) * width
            layer = projections + (model["conv_kernel"] + gains + 1) * channels + 3 * heads + inner + width
        case "implicit_llama3":
            mlp = model["intermediate_size"]
            query, key = llama3_widths(model)
            projections = (width + gains) * (query + 2 * key) + (query + gains) * width
            layer = projections + 2 * mlp * (width + gains) + width * (mlp + gains) + 2 * width
        case kind:
            if "num_parameters" not in model:
                raise UncountedModel(
                    f"model_type {kind!r}: only {MAMBA2} and {LLAMA3} are counted from their configuration; "
                    "give num_parameters"
                )
            return int(model["num_parameters"])
    injection = (width + gains + 1) * _injection_width(model) + width if model["is_implicit"] else 0
    embeddings = model["vocab_size"] * width * (1 if model.get("tie_word_embeddings", True) else 2)
    return int(embeddings + injection + model["num_hidden_layers"] * layer + width)


def _mamba2_layer(model: Mapping[str, Any], length: int) -> tuple[float, float]:
    """Return the FLOPs per token of projections and convolution together, and of the scan.

    SSD is masked attention inside a chunk, and a state that is passed from chunk to chunk. A token attends on average
    to (Q+1)/2 positions of its chunk. Each position needs a score C_i B_j for each group (2 G N), which is applied to
    all inner channels (2 I). The update of the state and the output from the state need 2 N I each. The first chunk has
    no state before it, and the state after the last chunk is not used.
    Source: Dao and Gu 2024, sections 6 and 7.
    """
    inner, _, channels = _mamba2_widths(model)
    projections = 2 * model["hidden_size"] * (_injection_width(model) + inner)
    convolution = 2 * model["conv_kernel"] * channels
    chunks = math.ceil(length / SSD_CHUNK_LEN)
    seen = (length / chunks + 1) / 2
    between = 4 * model["state_size"] * inner * (chunks - 1) / chunks
    scan = seen * 2 * (model["n_groups"] * model["state_size"] + inner) + between
    return projections + convolution, scan


def _llama3_layer(model: Mapping[str, Any], length: int) -> tuple[float, float]:
    """Return the FLOPs per token of projections and MLP (without padding columns) together, and of causal attention.

    A token attends to (L+1)/2 positions on average. Each position needs a score and a weighted value, each 2 H P over
    all query heads.
    """
    width, mlp = model["hidden_size"], model["intermediate_size"]
    query, key = llama3_widths(model)
    attention = 4 * query * (length + 1) / 2
    return 4 * width * (query + key) + 6 * width * mlp, attention


def llama3_widths(model: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths H P of query and key. Key and value have equal widths, and may have fewer heads than query."""
    heads = model.get("num_attention_heads") or 1
    head_dim = model.get("head_dim") or model.get("hidden_size", 0) // heads
    return heads * head_dim, (model.get("num_key_value_heads") or heads) * head_dim


def _mamba2_widths(model: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the inner width, the number of heads, and the channels of the convolution."""
    inner = model["expand"] * model["hidden_size"]
    return inner, inner // model["head_dim"], inner + 2 * model["n_groups"] * model["state_size"]


def _injection_width(model: Mapping[str, Any]) -> int:
    """Return the width of the injection, which is added to Mamba2's in-projection or Llama's query, key and value."""
    if model["model_type"] == LLAMA3:
        query, key = llama3_widths(model)
        return query + 2 * key
    inner, heads, channels = _mamba2_widths(model)
    return inner + channels + heads
