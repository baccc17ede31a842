"""A model's layer stack as the map f(., x) that the solver iterates.

Shapes: `B` batch, `L` length, `D` model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from implicit_llm.models.stack import Prefix, StackInput

if TYPE_CHECKING:
    from implicit_llm.models.backbone import ImplicitModel


class StackMap:
    """f(., x) of a model for one input: what the solver iterates (solver.passes: SequenceMap and BlockMap)."""

    def __init__(self, model: ImplicitModel, x: StackInput) -> None:
        self.model, self.x = model, x

    @property
    def valid_BL(self) -> Tensor | None:
        return self.x.valid_BL

    def __call__(self, z_BLD: Tensor) -> Tensor:
        if self.model.gradient_checkpointing and torch.is_grad_enabled() and self.model.training:
            return self.model._gradient_checkpointing_func(lambda z: self.model.apply_stack(z, self.x)[0], z_BLD)
        return self.model.apply_stack(z_BLD, self.x)[0]

    def select(self, index_B: Tensor) -> StackMap:
        return StackMap(self.model, self.x.select(index_B))

    def is_wanted(self, num_open: int) -> bool:
        """Sharded layers are gathered at each call, so every process has to call them until none needs them."""
        if self.x.mesh is None:
            return num_open > 0
        most = torch.tensor(num_open, device=self.x.mesh.device_type)
        for group in self.x.mesh.get_all_groups():
            distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
        return bool(most)

    def block(self, start: int, end: int, state: Prefix | None) -> StackMap:
        return StackMap(self.model, self.x.block(start, end, state))

    def close(self, z_BLD: Tensor) -> tuple[Tensor, Prefix]:
        out_BLD, layers = self.model.apply_stack(z_BLD, self.x, return_states=True)
        return out_BLD, self.x.extend_prefix(layers, z_BLD.shape[1])
