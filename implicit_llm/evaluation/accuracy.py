"""Counting right answers; no model and no solver here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LAST_TOKENS = 10  # those whose accuracy the published state-tracking experiments give


@dataclass
class AccuracyTally:
    """Right answers over the batches of one data set of sequences of `length` tokens."""

    length: int
    num_samples: int = 0
    num_nonfinite_samples: int = 0
    right_sequences: int = 0
    right_per_position: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.right_per_position = np.zeros(self.length, dtype=np.int64)

    def add(self, predictions_BL: np.ndarray, labels_BL: np.ndarray, is_finite_B: np.ndarray) -> None:
        """Count a batch; a sequence with a NaN or infinite logit has no prediction that could be counted."""
        is_right_BL = predictions_BL == labels_BL
        self.num_samples += len(labels_BL)
        self.num_nonfinite_samples += int((~is_finite_B).sum())
        self.right_per_position += is_right_BL.sum(axis=0)
        self.right_sequences += int(is_right_BL.all(axis=1).sum())

    def add_nonfinite(self, num_samples: int) -> None:
        """Count sequences for which the model gave no logits at all."""
        self.num_samples += num_samples
        self.num_nonfinite_samples += num_samples

    @property
    def has_result(self) -> bool:
        """Whether there is an accuracy to speak of: at least one sample, and no sample with non-finite logits."""
        return self.num_samples > 0 and self.num_nonfinite_samples == 0

    def last(self, count: int = LAST_TOKENS) -> float | None:
        """Share of right answers on the last `count` tokens (on all of them when the sequence is shorter)."""
        return float(self._shares()[-count:].mean()) if self.has_result else None

    def values(self) -> dict[str, object]:
        """The accuracies of a record of metrics.json; None where there is no number (never 0)."""
        if not self.has_result:
            keys = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")
            return dict.fromkeys(keys)
        shares = self._shares()
        return {
            "accuracy_last10": self.last(),
            "accuracy_sequence": self.right_sequences / self.num_samples,
            "accuracy_token": float(shares.mean()),
            "accuracy_per_position": [round(float(share), 6) for share in shares],
        }

    def _shares(self) -> np.ndarray:
        return self.right_per_position / self.num_samples
