"""Evaluate a Llama stack on one token of one sequence, in five kernels per layer (imported only if Triton runs).

`kernels.triton.token_products` explains why the kernels are few and how they overlap. The first kernel computes query,
key and value from the norm of h, and the second computes attention. The third adds the output projection to h, the
fourth computes gate, up and SwiGLU from the norm of h, and the fifth adds the down-projection to h.
The plain PyTorch twin is `models.backbone.ImplicitModel.apply_stack`.

Shapes: `S` room for keys, `D` model, `H` heads, `P` head width, `O` H P, `E` 3 O, `M` MLP width, `G` 2 M.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_llm.kernels.triton.token_products import TokenProducts
from implicit_llm.models.llama3.triton.attention import token_attention
from implicit_llm.models.stack import LayerState


class Llama3TokenLayer(NamedTuple):
    """The effective weights of one layer, in fp32 and contiguous."""

    attention_norm_D: Tensor
    qkv_ED: Tensor
    o_proj_DO: Tensor
    mlp_norm_D: Tensor
    gate_up_GD: Tensor
    down_DM: Tensor


class Llama3TokenStack:
    """The layers of a stack, and the tensors between their kernels."""

    def __init__(self, layers: list[Llama3TokenLayer], eps: float) -> None:
        device = layers[0].qkv_ED.device
        self._layers, self._products = layers, TokenProducts(eps, device)
        self._qkv_11E = torch.empty(1, 1, len(layers[0].qkv_ED), device=device)
        self._gated_M = torch.empty(layers[0].down_DM.shape[1], device=device)

    def __call__(
        self,
        z_11D: Tensor,
        injection_11E: Tensor,
        rope: tuple[Tensor, Tensor],
        rooms: tuple[LayerState, ...],
        position_1: Tensor,
    ) -> Tensor:
        """Return the residual stream (1, 1, D) after the last layer, before the final norm.

        Args: rope holds cosines and sines (1, 1, P/2). rooms are the contiguous keys and values (1, H, S, P) of each
            layer; the token's keys and values are written there at `position_1`, an integer tensor. All other tensors
            are in fp32.
        """
        products, injection_11E, from_11D = self._products, injection_11E.contiguous(), z_11D.contiguous()
        h_11D, qkv_11E = torch.empty_like(from_11D), self._qkv_11E
        for index, (layer, room) in enumerate(zip(self._layers, rooms, strict=True)):
            attention_norm_D, qkv_ED, o_proj_DO, mlp_norm_D, gate_up_GD, down_DM = layer
            products.project(from_11D, attention_norm_D, qkv_ED, qkv_11E, added=injection_11E, is_first=index == 0)
            out_11O = token_attention(qkv_11E, None, rope, (room[0], room[1]), position_1, products.launch)
            products.add(out_11O, o_proj_DO, from_11D, h_11D)
            products.project(h_11D, mlp_norm_D, gate_up_GD, self._gated_M, has_gates=True)
            products.add(self._gated_M, down_DM, h_11D, h_11D)
            from_11D = h_11D
        return h_11D
