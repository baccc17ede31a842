"""Pass states between training steps: a sequence starts in the last state of the previous sequence in its chain.

A model that trains on short sequences thereby gets the states of long sequences. The cost is that of short sequences,
because no gradient flows into the previous sequence. Each batch element has one chain of sequences. The chains restart
from the empty state after different numbers of sequences, so in most steps the chains have different lengths. After
every `state_passing` steps, all chains restart together. With `restart_when_wrong`, a chain also restarts after a wrong
last prediction. The state after such a prediction no longer contains the right product, and an implicit model that is
trained to continue from it forgets what it has learned. A model at chance therefore hardly ever carries a state; the
metric carried_share is the share of sequences that start from a carried state.

Source: Buitrago Ruiz and Gu 2025 (arXiv 2507.02782); the rules for restarts are new here.
Shapes: `B` batch, `L` length, `V` vocabulary, `A` elements of group x monoid.
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
class Chains:
    """The chains of a micro-batch, at the start of a sequence.

    cache: the states before the sequence. product_B: the product of the chain's earlier sequences since its last
    restart. is_carried_B: whether the chain has such earlier sequences.
    """

    cache: ConvergedStateCache
    product_B: Tensor
    is_carried_B: Tensor


class StatePassing:
    """The states that a phase carries from step to step.

    With `phase.state_passing` 64, half of the chains restart from the empty state after every 64 sequences, a quarter
    after every 32, an eighth after every 16, and so on. All chains therefore restart after every 64 steps, and a
    checkpoint at such a step needs no states.
    """

    def __init__(
        self, phase: PhaseConfig, data_source: Mapping[str, Any], layout: BatchLayout, device: torch.device
    ) -> None:
        """Prepare the product table and the length of each chain; `join` creates the states.

        data_source: `TokenDataset.source`, which names the group and the monoid.
        """
        assert phase.state_passing is not None
        table_AA = load_product(data_source["group"], data_source["monoid"]).table
        self._table_AA = torch.tensor(table_AA, dtype=torch.long, device=device)
        self._start, self._steps = phase.start_step, phase.state_passing
        self._restarts_when_wrong = phase.restart_when_wrong
        number_B = torch.as_tensor(1 + layout.own(np.arange(layout.batch_size)), device=device)
        length_B = (self._steps // (number_B & -number_B)).clamp(min=1)  # 64, 32, 64, 16, 64, 32, 64, 8, ...
        self._length_by_batch = length_B.split(layout.micro_batch_size)
        self._chains: list[Chains] = []

    def starts_at(self, step: int) -> bool:
        """Return whether all chains start from the empty state after `step` finished steps."""
        return (step - self._start) % self._steps == 0

    def join(self, batches: list[dict[str, Any]], step: int) -> None:
        """Change a step's micro-batches in place, so that their sequences continue the chains.

        Each label becomes the chain's product times this label. `chains`, `carried_share` and `ends` (B) are added;
        `ends` is True where the chain restarts after this sequence whatever the prediction is. `step` counts the
        finished steps.
        """
        if self.starts_at(step):
            empty_B = torch.zeros_like(batches[0]["labels"][:, 0])
            self._chains = [Chains(ConvergedStateCache(), empty_B, empty_B.bool()) for _ in batches]
        sequences = (step - self._start) % self._steps + 1
        for chains, batch, length_B in zip(self._chains, batches, self._length_by_batch, strict=True):
            batch["chains"], batch["ends"] = chains, sequences % length_B == 0
            batch["carried_share"] = chains.is_carried_B.float().mean()
            batch["labels"] = self._table_AA[chains.product_B[:, None], batch["labels"]]

    def leave(self, batch: dict[str, Any], logits_BLV: Tensor) -> None:
        """Store the last states and products of a micro-batch, and reset those of the chains that restart.

        If the solver failed, there is no state, and the step ends in NonFiniteTraining.
        """
        chains, label_B = batch["chains"], batch["labels"][:, -1]
        if chains.cache.prefix is None:
            return
        continues_B = ~batch["ends"]
        if self._restarts_when_wrong:
            continues_B = continues_B & (logits_BLV[:, -1].argmax(-1) == label_B)
        chains.is_carried_B = continues_B
        chains.product_B = label_B * continues_B  # element 0 is the identity
        chains.cache.prefix = chains.cache.prefix.map(lambda t: t.detach() * continues_B.view(-1, *[1] * (t.ndim - 1)))
