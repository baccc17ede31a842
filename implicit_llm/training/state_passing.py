"""State passing: a word starts in the state in which the word before it in its row of the batch ended.

So a model that trains on short words meets the states of long ones, at the cost of short ones: no gradient goes back
into the word before. The rows of a batch join different numbers of words before they start from the empty state again,
so that each step has states of all ages. With `restart_when_wrong`, a row also starts again after a wrong last answer:
the old state has lost the product, and an implicit model that is trained to go on from it forgets what it could do. A
model at chance then never carries a state; the metric carried_share says how often one is carried.

Source: Buitrago Ruiz and Gu 2025 (arXiv 2507.02782), without the rules for when a row starts again.
Shapes: `B` batch, `L` length, `V` vocabulary, `A` elements of the group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """The start of each word of a micro-batch: state, product of the words before, and whether there are any."""

    cache: ConvergedStateCache
    product_B: Tensor
    is_carried_B: Tensor


class StatePassing:
    """The states between the steps of a phase.

    With `phase.state_passing` 64, half of the rows of a batch start empty after 64 words, a quarter after 32, an eighth
    after 16, and so on. So all of them start empty after every 64 steps, and a checkpoint that is taken there need not
    hold any state.
    """

    def __init__(
        self, phase: PhaseConfig, data_source: Mapping[str, Any], layout: BatchLayout, device: torch.device
    ) -> None:
        """data_source: what the words were made from, `TokenDataset.source`."""
        assert phase.state_passing is not None
        table_AA = load_product(data_source["group"], data_source["monoid"]).table
        self._table_AA = torch.tensor(table_AA, dtype=torch.long, device=device)
        self._start, self._steps = phase.start_step, phase.state_passing
        self._restarts_when_wrong = phase.restart_when_wrong
        row_B = torch.as_tensor(1 + layout.own(np.arange(layout.batch_size)), device=device)
        words_B = (self._steps // (row_B & -row_B)).clamp(min=1)  # 64, 32, 64, 16, 64, 32, 64, 8, ...
        self._words_by_batch = words_B.split(layout.micro_batch_size)
        self._rows: list[Rows] = []

    def starts_at(self, step: int) -> bool:
        """Whether all rows start empty after `step` finished steps."""
        return (step - self._start) % self._steps == 0

    def join(self, batches: list[dict[str, Any]], step: int) -> None:
        """Let the words of a step go on from those of the last, and change the `labels` of the micro-batches to match.

        Also set `rows`, `ends` (B), after which words the row starts empty whatever the answer, and `carried_share`.
        """
        if self.starts_at(step):
            empty_B = torch.zeros_like(batches[0]["labels"][:, 0])
            self._rows = [Rows(ConvergedStateCache(), empty_B, empty_B.bool()) for _ in batches]
        words = (step - self._start) % self._steps + 1
        for rows, batch, words_B in zip(self._rows, batches, self._words_by_batch, strict=True):
            batch["rows"], batch["ends"] = rows, words % words_B == 0
            batch["carried_share"] = rows.is_carried_B.float().mean()
            batch["labels"] = self._table_AA[rows.product_B[:, None], batch["labels"]]

    def leave(self, batch: dict[str, Any], logits_BLV: Tensor) -> None:
        """Keep what the rows of a micro-batch end in, and empty those that start again."""
        rows, answer_B = batch["rows"], batch["labels"][:, -1]
        goes_on_B = ~batch["ends"]
        if self._restarts_when_wrong:
            goes_on_B = goes_on_B & (logits_BLV[:, -1].argmax(-1) == answer_B)
        rows.is_carried_B = goes_on_B
        rows.product_B = answer_B * goes_on_B  # element 0 is the identity
        rows.cache.prefix = rows.cache.prefix.map(lambda t: t.detach() * goes_on_B.view(-1, *[1] * (t.ndim - 1)))
