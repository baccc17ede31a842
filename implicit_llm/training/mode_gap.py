"""What is measured of a fixed point now and then in training: mode gap and spectral radius.

The mode gap is what a model loses, or gains, when its fixed point is found the way it is in evaluation.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

import math
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm.analysis.spectral_radius import spectral_radius
from implicit_llm_data.shards import IGNORED_LABEL

# An evaluation takes up to four times max_iter iterations for every block of tokens, so both look at few: in a phase
# without fixed points yet, more would cost minutes. Models are causal: what follows a token does not change its loss.
SEQUENCES, POSITIONS = 8, 512
RADIUS_SEQUENCES, RADIUS_POSITIONS = 4, 128
RADIUS_PRODUCTS = 40  # each a backward pass; within a few percent of the limit on trained models
POINTS = 10  # over a curriculum
_MIN_INTERVAL_STEPS = 5


def is_due(step: int, total_steps: int) -> bool:
    """Whether to measure in the step that will be number `step`: every tenth part of the curriculum."""
    return step % max(_MIN_INTERVAL_STEPS, total_steps // POINTS) == 0


@torch.no_grad()
def look_at_fixed_point(
    model: Any, inputs: dict[str, Any], outputs: Any, context: AbstractContextManager[Any]
) -> dict[str, Tensor]:
    """mode_gap and spectral_radius of an implicit language model, on the first tokens of a micro-batch; not yet read.

    mode_gap: loss in evaluation mode minus that of the training pass with these `outputs`. spectral_radius: of df/dz at
    the fixed point that evaluation finds, the largest over the tokens of a sequence, as a mean over sequences.
    Takes nothing from the random state, leaves gradients as they were and the model in training mode. NaN where the
    evaluation is not finite.
    """
    part = (slice(SEQUENCES), slice(POSITIONS))
    input_ids, labels_BL = inputs["input_ids"][part], inputs["labels"][part]
    some_ids, base = input_ids[:RADIUS_SEQUENCES, :RADIUS_POSITIONS], model.base
    found = dict.fromkeys(("mode_gap", "spectral_radius"), torch.full((), math.nan, device=labels_BL.device))
    model.eval()
    try:
        with context, suppress(FloatingPointError):
            # A pass without accuracy made no logits.
            trained_BLV = model.lm_head(outputs.last_hidden_state[part]) if outputs.logits is None else outputs.logits
            evaluated_BLV = model(input_ids=input_ids, use_cache=False).logits
            found["mode_gap"] = _loss(evaluated_BLV, labels_BL) - _loss(trained_BLV[part], labels_BL)
            del trained_BLV, evaluated_BLV  # large
            z_BLD = base(some_ids, use_cache=False).last_hidden_state
            x = base.stack_input(base.get_input_embeddings()(some_ids), None, None, None)
            found["spectral_radius"] = spectral_radius(base, x, z_BLD, num_products=RADIUS_PRODUCTS).float().mean()
    finally:
        model.train()
    return found


def _loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED_LABEL)
