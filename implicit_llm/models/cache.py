"""Define the cache of converged states, which generation carries from token to token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from implicit_llm.models.stack import Prefix


class ConvergedStateCache(Cache):
    """The converged states (such as SSM states, or keys and values) of a batch of sequences after all tokens so far.

    A model that gets the cache as `past_key_values` starts from these states and then advances the cache in place.
    prefix: the states; None if there are none yet. made_by: the type and size of the model that computes the states.
    is_growing: whether the states grow with the sequence.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.prefix: Prefix | None = None
        self.made_by = ""
        self.is_growing = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.prefix is None else self.prefix.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.prefix is not None:
            self.prefix = self.prefix.without_room().select(indices.to(self.prefix.layers[0][0].device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.prefix is not None:
            tensor = self.prefix.layers[0][0]
            self.batch_select_indices(torch.arange(len(tensor), device=tensor.device).repeat_interleave(repeats))

    def reset(self) -> None:
        self.prefix = None

    def crop(self, tokens: int) -> None:
        """Remove the last `-tokens` tokens if `tokens` is negative, or all after the first `tokens` if it is positive.

        transformers up to 5.20 passes positive numbers. The call changes nothing for 0 and for an empty cache.
        Raises: NotImplementedError for recurrent states; ValueError for more tokens than the cache holds.
        """
        if self.prefix is None or tokens == 0:
            return
        if not self.is_growing:
            raise NotImplementedError(
                f"past_key_values: the recurrent state of {self.made_by} cannot forget its last tokens; "
                "use a decoding method that never rewinds"
            )
        before = self.prefix
        length = tokens if tokens > 0 else before.length + tokens
        if not 0 <= length <= before.length:
            raise ValueError(
                f"past_key_values: the cache holds {before.length} tokens and cannot be cropped by {tokens}"
            )
        self.prefix = before.first(length)

    def join(self, model: str, batch: int, *, is_growing: bool) -> None:
        """Check that the states are of `model` and of `batch` sequences; if there are none, set made_by and is_growing.

        Raises: ValueError for states of another model or of another number of sequences.
        """
        if self.prefix is None:
            self.made_by, self.is_growing = model, is_growing
        elif self.made_by != model:
            raise ValueError(f"past_key_values: the cache comes from {self.made_by}, but the model is {model}")
        elif (held := len(self.prefix.layers[0][0])) != batch:
            raise ValueError(
                f"past_key_values: the cache holds {held} sequences, but the input has {batch}; "
                "reorder them with batch_select_indices"
            )
