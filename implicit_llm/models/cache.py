"""The cache of converged states that generation carries from token to token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from implicit_llm.models.stack import Prefix


class ConvergedStateCache(Cache):
    """Converged SSM and convolution states, or keys and values, of everything seen so far, for one batch.

    Given as `past_key_values` (or `cache_params`) to a model, it is read and then advanced in place.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.prefix: Prefix | None = None

    def advance(self, prefix: Prefix) -> None:
        self.prefix = prefix

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.prefix is None else self.prefix.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.prefix is not None:
            self.prefix = self.prefix.select(indices.to(self.prefix.layers[0][0].device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.prefix is not None:
            tensor = self.prefix.layers[0][0]
            self.batch_select_indices(torch.arange(len(tensor), device=tensor.device).repeat_interleave(repeats))

    def reset(self) -> None:
        self.prefix = None

    def crop(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "a recurrent state cannot forget its last tokens; use a decoding method that never rewinds"
        )
