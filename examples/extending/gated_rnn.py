"""A model family: a gated linear RNN, whose state is multiplied by a gate of the input, channel by channel.

Such a layer by itself cannot follow a group that is not commutative; iterated to a fixed point it learns S3.

Shapes: `B` batch, `L` length, `D` model, `E` = 3 D.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.nn import functional as F

from implicit_llm import ImplicitConfig, Projection, RecurrentLayer, RMSNorm, register_family

PLUGIN = {"families": ["gated_rnn"]}


@strict
class GatedRnnConfig(ImplicitConfig):
    """`hidden_size` is also the width of the state."""

    model_type = "gated_rnn"

    @property
    def injection_width(self) -> int:
        """Gate, value and output gate together."""
        return 3 * self.hidden_size


class GatedRnnLayer(RecurrentLayer):
    """s_t = a_t s_(t-1) + (1 - a_t) v_t, with gate a and value v from the input; the output is gated too."""

    def __init__(self, config: GatedRnnConfig) -> None:
        super().__init__()
        width, normed = config.hidden_size, config.has_weight_norm
        self.norm = RMSNorm(width, 1e-5)
        self.in_proj = Projection((config.injection_width, width), bias=True, weight_norm=normed)
        self.out_proj = Projection((width, width), bias=False, weight_norm=normed)

    def mix(
        self,
        h_BLD: Tensor,
        injection_BLE: Tensor | None,
        state: tuple[Tensor, ...] | None,
        valid_BL: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        projected_BLE = self.in_proj(self.norm(h_BLD))
        if injection_BLE is not None:
            projected_BLE = projected_BLE + injection_BLE
        gate_BLD, value_BLD, out_BLD = projected_BLE.chunk(3, dim=-1)
        gate_BLD = gate_BLD.sigmoid()
        if valid_BL is not None:  # padding keeps the state as it is
            gate_BLD = torch.where(valid_BL[..., None], gate_BLD, 1.0)
        added_BLD = (1 - gate_BLD) * value_BLD
        s_BD = torch.zeros_like(added_BLD[:, 0]) if state is None else state[0]
        states = []
        for gate_BD, added_BD in zip(gate_BLD.unbind(1), added_BLD.unbind(1), strict=True):
            s_BD = gate_BD * s_BD + added_BD
            states.append(s_BD)
        return self.out_proj(torch.stack(states, dim=1) * F.silu(out_BLD)), (s_BD,)


register_family("gated_rnn", GatedRnnConfig, GatedRnnLayer)
