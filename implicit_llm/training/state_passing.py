"""State passing: a word starts in the converged state in which the word before it in its row of the batch ended.

So a model that trains on short words meets the states of long ones, at the cost of short ones: no gradient goes back
into the word before. After a wrong last answer a row starts from the empty state again: the old one has lost the
product, and a model that is trained to go on from it forgets what it could do.

Source: Buitrago Ruiz and Gu 2025 (arXiv 2507.02782), without the rule for wrong answers.
Shapes: `B` batch, `L` length, `V` vocabulary, `A` elements of the group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm_contracts.config.training import PhaseConfig
from implicit_llm_data.groups import load_product


@dataclass
class Rows:
    """Where the words of a micro-batch start: the converged state, and the product of the words before (B)."""

    cache: ConvergedStateCache
    product_B: Tensor


class StatePassing:
    """The states between the steps of a phase.

    All rows start empty at the first step and after every `phase.state_passing` steps, so that nothing has to be stored
    in a checkpoint that is taken there.
    """

    def __init__(self, phase: PhaseConfig, data_source: Mapping[str, Any], device: torch.device) -> None:
        """data_source: what the words were made from, `TokenDataset.source`."""
        algebra = load_product(data_source["group"], data_source["monoid"])
        self._table_AA = torch.from_numpy(algebra.table.astype(np.int64)).to(device)
        self._phase = phase
        self._rows: list[Rows] = []

    def starts_at(self, step: int) -> bool:
        """Whether all rows start empty after `step` finished steps."""
        assert self._phase.state_passing is not None
        return (step - self._phase.start_step) % self._phase.state_passing == 0

    def join(self, batches: list[dict[str, Any]], step: int) -> None:
        """Let the words of a step go on from those of the last: sets `rows` and `labels` of the micro-batches."""
        if self.starts_at(step):
            self._rows = [Rows(ConvergedStateCache(), torch.zeros_like(batch["labels"][:, 0])) for batch in batches]
        for rows, batch in zip(self._rows, batches, strict=True):
            batch["rows"] = rows
            batch["labels"] = self._table_AA[rows.product_B[:, None], batch["labels"]]

    def leave(self, batch: dict[str, Any], logits_BLV: Tensor) -> None:
        """Keep what the rows of a micro-batch with a right last answer end in, and empty the others."""
        rows, answer_B = batch["rows"], batch["labels"][:, -1]
        is_right_B = logits_BLV[:, -1].argmax(-1) == answer_B
        rows.product_B = answer_B * is_right_B  # element 0 is the identity
        prefix = rows.cache.prefix
        layers = tuple(
            tuple(torch.where(is_right_B.view(-1, *[1] * (t.ndim - 1)), t.detach(), 0) for t in layer)
            for layer in prefix.layers
        )
        rows.cache.prefix = replace(prefix, layers=layers)
