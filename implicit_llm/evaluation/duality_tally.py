"""How far the answers of two modes to the same tokens are apart.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicit_llm.evaluation import answers as reading
from implicit_llm.evaluation.duality_modes import ModeOutput
from implicit_llm.evaluation.solver_tally import SolverTally, finite

MEASURES = ("token_agreement", "logit_distance_mean", "logit_distance_max", "logit_std", "kl")


@dataclass
class PairTally:
    """Sums over tokens; distances and spread are means over the vocabulary first."""

    num_tokens: int = 0
    num_equal: int = 0
    distance: float = 0.0
    distance_max: float = 0.0
    spread: float = 0.0
    divergence: float = 0.0

    def add(self, logits_BLV: Tensor, reference_BLV: Tensor) -> None:
        difference_BLV = (logits_BLV - reference_BLV).abs()
        log_shares_BLV, log_reference_BLV = logits_BLV.log_softmax(-1), reference_BLV.log_softmax(-1)
        kl_BL = (log_reference_BLV.exp() * (log_reference_BLV - log_shares_BLV)).sum(-1)
        self.num_tokens += kl_BL.numel()
        self.num_equal += int((logits_BLV.argmax(-1) == reference_BLV.argmax(-1)).sum())
        self.distance += float(difference_BLV.mean(-1).double().sum())
        self.distance_max = max(self.distance_max, float(difference_BLV.max()))
        self.spread += float(reference_BLV.std(-1).double().sum())
        self.divergence += float(kl_BL.double().sum())

    def merge(self, other: PairTally) -> None:
        """Count what `other` has counted too."""
        self.num_tokens += other.num_tokens
        self.num_equal += other.num_equal
        self.distance += other.distance
        self.distance_max = max(self.distance_max, other.distance_max)
        self.spread += other.spread
        self.divergence += other.divergence

    def values(self) -> dict[str, float | int | None]:
        """token_agreement: share of tokens with the same most likely next token. kl: of the mode from the reference,
        nats a token. logit_std: of the reference over the vocabulary, what a distance is to be compared with."""
        if not self.num_tokens:
            return dict.fromkeys(MEASURES) | {"num_tokens": 0}
        return {
            "token_agreement": self.num_equal / self.num_tokens,
            "logit_distance_mean": finite(self.distance / self.num_tokens),
            "logit_distance_max": finite(self.distance_max),
            "logit_std": finite(self.spread / self.num_tokens),
            "kl": finite(max(0.0, self.divergence / self.num_tokens)),
            "num_tokens": self.num_tokens,
        }


@dataclass
class DualityTally:
    """All pairs of modes, and what each mode cost, over the first `num_rows` rows."""

    pairs: dict[str, PairTally]
    solvers: dict[str, SolverTally] = field(default_factory=dict)
    num_rows: int = 0
    num_nonfinite_rows: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> DualityTally:
        return cls({_key(pair): PairTally() for pair in pairs})

    def add(self, outputs: Mapping[str, ModeOutput], compared: Mapping[str, PairTally]) -> None:
        """Count a batch; `compared` is what `compare` made of it."""
        for name, output in outputs.items():
            self.solvers.setdefault(name, SolverTally()).add(output.stats, output.states.shape[:2])  # type: ignore[arg-type]
        for key, tally in compared.items():
            self.pairs[key].merge(tally)

    def pair(self, pair: tuple[str, str]) -> PairTally:
        return self.pairs[_key(pair)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives an equal tally back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DualityTally:
        pairs = {key: PairTally(**fields) for key, fields in values["pairs"].items()}
        solvers = {key: SolverTally(**fields) for key, fields in values["solvers"].items()}
        return cls(pairs, solvers, values["num_rows"], values["num_nonfinite_rows"])


def _key(pair: tuple[str, str]) -> str:
    return "|".join(pair)


def compare(outputs: Mapping[str, ModeOutput], pairs: Iterable[str]) -> dict[str, PairTally]:
    """The pairs of modes on one batch, a piece of the positions at a time."""
    found = {key: PairTally() for key in pairs}
    batch, length = next(iter(outputs.values())).states.shape[:2]
    step = max(1, reading.LOSS_TOKENS // (batch * len(outputs)))
    for start in range(0, length, step):
        logits = {name: output.logits(slice(start, start + step)) for name, output in outputs.items()}
        for key, tally in found.items():
            mode, reference = key.split("|")
            tally.add(logits[mode], logits[reference])
    return found


def is_finite(outputs: Mapping[str, ModeOutput]) -> bool:
    """Whether no mode has a NaN or infinite state."""
    return all(bool(torch.isfinite(output.states).all()) for output in outputs.values())
