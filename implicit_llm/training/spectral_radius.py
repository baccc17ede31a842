"""How strongly f contracts along training: the spectral radius of df/dz at the fixed point, on a few tokens.

Measured together with the mode gap. Below 1 the iteration converges near its fixed point; the closer to 1, the slower.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from implicit_llm.analysis.spectral_radius import spectral_radius
from implicit_llm.models.causal_lm import ImplicitForCausalLM

# The fixed point takes up to four times max_iter iterations for every block of tokens, and the products as many
# backward passes; 40 products are within a few percent of the limit on trained models.
SEQUENCES, POSITIONS, PRODUCTS = 4, 128, 40


@torch.no_grad()
def mean_spectral_radius(
    model: ImplicitForCausalLM, inputs: dict[str, Any], context: AbstractContextManager[Any]
) -> Tensor:
    """Spectral radius of df/dz at the fixed point that evaluation finds, as a mean over sequences; not yet read.

    Of the first POSITIONS of the first SEQUENCES of a micro-batch: for each sequence, the largest over its tokens.
    Takes nothing from the random state, and leaves gradients and training mode as they were. NaN where the fixed point
    is not finite.
    """
    input_ids = inputs["input_ids"][:SEQUENCES, :POSITIONS]
    base = model.base
    model.eval()
    try:
        with context:
            z_BLD = base(input_ids, use_cache=False).last_hidden_state
            x = base.stack_input(base.get_input_embeddings()(input_ids), None, None, None)
            return spectral_radius(base, x, z_BLD, num_products=PRODUCTS).float().mean()
    except FloatingPointError:
        return torch.full((), math.nan, device=input_ids.device)
    finally:
        model.train()
