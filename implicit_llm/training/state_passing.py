"""State passing: a word starts in the converged state in which the word before it in its row of the batch ended.

So a model that trains on short words meets the states of long ones, at the cost of short ones: no gradient goes back
into the word before. The rows of a batch join different numbers of words before they start from the empty state again,
so that each step has states of all ages. A row also starts again after a wrong last answer: the old state has lost the
product, and a model that is trained to go on from it forgets what it could do.

Source: Buitrago Ruiz and Gu 2025 (arXiv 2507.02782), without the rules for when a row starts again.
Shapes: `B` batch, `L` length, `V` vocabulary, `A` elements of the group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.training.batches import BatchLayout
from implicit_llm_contracts.config.training import PhaseConfig
from implicit_llm_data.groups import load_product


@dataclass
class Rows:
    """Where the words of a micro-batch start: the converged state, and the product of the words before (B).

    ends_B: whether the next word starts in the empty state, whatever the answer to this one.
    """

    cache: ConvergedStateCache
    product_B: Tensor
    ends_B: Tensor


class StatePassing:
    """The states between the steps of a phase.

    With `phase.state_passing` 64, the rows of a batch start empty after 64, 32, 16, 8, 4, 2 and 1 words, in turn. So all
    of them start empty after every 64 steps, and a checkpoint that is taken there need not hold any state.
    """

    def __init__(
        self, phase: PhaseConfig, data_source: Mapping[str, Any], layout: BatchLayout, device: torch.device
    ) -> None:
        """data_source: what the words were made from, `TokenDataset.source`."""
        assert phase.state_passing is not None
        algebra = load_product(data_source["group"], data_source["monoid"])
        self._table_AA = torch.from_numpy(algebra.table.astype(np.int64)).to(device)
        self._start, self._steps = phase.start_step, phase.state_passing
        row_B = torch.from_numpy(layout.own(np.arange(layout.batch_size))).to(device)
        self._words_by_batch = (self._steps >> row_B % self._steps.bit_length()).split(layout.micro_batch_size)
        self._rows: list[Rows] = []

    def starts_at(self, step: int) -> bool:
        """Whether all rows start empty after `step` finished steps."""
        return (step - self._start) % self._steps == 0

    def join(self, batches: list[dict[str, Any]], step: int) -> None:
        """Let the words of a step go on from those of the last: sets `rows` and `labels` of the micro-batches."""
        if self.starts_at(step):
            empty_B = torch.zeros_like(batches[0]["labels"][:, 0])
            self._rows = [Rows(ConvergedStateCache(), empty_B, empty_B) for _ in batches]
        words = (step - self._start) % self._steps + 1
        for rows, batch, words_B in zip(self._rows, batches, self._words_by_batch, strict=True):
            rows.ends_B = words % words_B == 0
            batch["rows"] = rows
            batch["labels"] = self._table_AA[rows.product_B[:, None], batch["labels"]]

    def leave(self, batch: dict[str, Any], logits_BLV: Tensor) -> None:
        """Keep what the rows of a micro-batch end in, and empty those that end or whose last answer is wrong."""
        rows, answer_B = batch["rows"], batch["labels"][:, -1]
        goes_on_B = (logits_BLV[:, -1].argmax(-1) == answer_B) & ~rows.ends_B
        rows.product_B = answer_B * goes_on_B  # element 0 is the identity
        prefix = rows.cache.prefix
        layers = tuple(
            tuple(torch.where(goes_on_B.view(-1, *[1] * (t.ndim - 1)), t.detach(), 0) for t in layer)
            for layer in prefix.layers
        )
        rows.cache.prefix = replace(prefix, layers=layers)
