"""The mode gap: what a model loses, or gains, when its fixed point is found the way it is in evaluation.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from implicit_llm_data.shards import IGNORED_LABEL

# An evaluation takes up to four times max_iter iterations for every block of tokens, so it is kept small: in a phase
# without fixed points yet, more would cost minutes. Models are causal: what follows a token does not change its loss.
SEQUENCES, POSITIONS = 8, 512
POINTS = 10  # over a curriculum
_MIN_INTERVAL_STEPS = 5


def is_due(step: int, total_steps: int) -> bool:
    """Whether to measure in the step that will be number `step`: every tenth part of the curriculum."""
    return step % max(_MIN_INTERVAL_STEPS, total_steps // POINTS) == 0


@torch.no_grad()
def trained_logits(model: Any, outputs: Any, context: AbstractContextManager[Any]) -> Tensor:
    """The logits of a training pass at the tokens that `mode_gap` looks at, made now if the pass made none."""
    if outputs.logits is not None:
        return outputs.logits
    with context:
        return model.lm_head(outputs.last_hidden_state[:SEQUENCES, :POSITIONS])


@torch.no_grad()
def mode_gap(
    model: PreTrainedModel, inputs: dict[str, Any], logits_BLV: Tensor, context: AbstractContextManager[Any]
) -> Tensor:
    """Loss in evaluation mode minus that of `logits_BLV`, of training mode; not yet read.

    Of the first POSITIONS of the first SEQUENCES of a micro-batch.
    Takes nothing from the random state, and leaves the model in training mode. NaN where the evaluation is not finite.
    """
    part = (slice(SEQUENCES), slice(POSITIONS))
    input_ids, labels_BL = inputs["input_ids"][part], inputs["labels"][part]
    model.eval()
    try:
        with context:
            evaluated_BLV = model(input_ids=input_ids, use_cache=False).logits
    except FloatingPointError:
        return torch.full((), math.nan, device=labels_BL.device)
    finally:
        model.train()
    return _loss(evaluated_BLV, labels_BL) - _loss(logits_BLV[part], labels_BL)


def _loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED_LABEL)
