"""Training metrics, gathered on the device without waiting for it, read when they are logged or saved.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.training.batches import IGNORED_LABEL
from implicit_llm.training.distributed import mean_over_ranks

LAST_TOKENS = 10  # the metric of the published state-tracking experiments
RECENT_STEPS = 50
COLUMNS = ("loss", "grad_norm", "accuracy_last10", "num_iter", "f_evaluations", "residual", "unconverged_share")
LOSS, GRAD_NORM = COLUMNS.index("loss"), COLUMNS.index("grad_norm")
_SOLVER = COLUMNS[3:]
_MEASURED_ONLY = ("num_iter", "residual", "unconverged_share")  # of no meaning where no residual is measured


class StepMetrics:
    """One row of COLUMNS a step; NaN where a model has no such number.

    loss: over the labels of the global batch. accuracy_last10: on the training batch. num_iter: solver iterations a
    token, f_evaluations: with phantom and unrolled steps; both are means over sequences. residual: the largest of the
    batch. unconverged_share: of the tokens.
    """

    def __init__(self) -> None:
        self._micro: list[Tensor] = []
        self._pending: list[Tensor] = []
        self._window: list[list[float]] = []
        self._recent: deque[list[float]] = deque(maxlen=RECENT_STEPS)

    @torch.no_grad()
    def add(self, loss: Tensor, logits_BLV: Tensor, labels_BL: Tensor, stats: Any) -> None:
        """Count a micro-batch; `loss` is its share of the step's loss, `stats` are SolverStats or None."""
        last_labels = labels_BL[:, -LAST_TOKENS:]
        is_right = logits_BLV[:, -LAST_TOKENS:].argmax(-1) == last_labels
        accuracy = is_right.sum() / (last_labels != IGNORED_LABEL).sum()
        row = [loss.detach().float(), accuracy]
        if stats is None:
            row += [_nan(loss.device)] * len(_SOLVER)
        else:
            num_iter = stats.num_iter.float().mean()
            unconverged = stats.unconverged_tokens.sum() / labels_BL.numel()
            row += [num_iter, num_iter + stats.num_closing, stats.residual.float().amax(), unconverged]
        self._micro.append(torch.stack(row))

    def close_step(self, grad_norm: Tensor) -> Tensor:
        """End the step; return its loss and gradient norm, shape (2,)."""
        row = self._micro[0] if len(self._micro) == 1 else torch.stack(self._micro).mean(0)
        loss = row[0] * len(self._micro)
        self._micro = []
        head = torch.stack((loss, grad_norm.detach().float()))
        self._pending.append(torch.cat((head, row[1:])))
        return head

    def pull(self) -> list[list[float]]:
        """Read the rows closed since the last pull; waits for the device, and with several ranks is collective."""
        if not self._pending:
            return []
        rows = mean_over_ranks(torch.stack(self._pending)).tolist()
        self._pending = []
        self._window += rows
        self._recent.extend(rows)
        return rows

    def drain(self) -> dict[str, float]:
        """Means over the rows pulled since the last drain."""
        rows, self._window = self._window, []
        return means(rows)

    def recent(self) -> dict[str, float]:
        """Means over the last RECENT_STEPS steps, however often they were logged."""
        return means(list(self._recent))

    def recent_rows(self) -> list[dict[str, float | None]]:
        """The last steps one by one."""
        return [{key: _json(value) for key, value in zip(COLUMNS, row, strict=True)} for row in self._recent]

    def state(self) -> dict[str, Any]:
        """Rows not yet logged and the recent ones, as JSON values; call `pull` first."""
        return {
            "columns": list(COLUMNS),
            "window": [[_json(value) for value in row] for row in self._window],
            "recent": [[_json(value) for value in row] for row in self._recent],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo everything since `state`; rows with other columns are left out."""
        is_same = tuple(state["columns"]) == COLUMNS
        self._micro, self._pending = [], []
        self._window = [_numbers(row) for row in state["window"]] if is_same else []
        self._recent = deque((_numbers(row) for row in state["recent"]) if is_same else (), maxlen=RECENT_STEPS)

    def start_phase(self) -> None:
        """Forget the steps of an earlier phase."""
        self._window = []
        self._recent.clear()


def means(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean of each column that has numbers in every row; what a solver did not measure is left out."""
    if not rows:
        return {}
    values = dict(zip(COLUMNS, np.asarray(rows, dtype=np.float64).mean(0).tolist(), strict=True))
    if math.isnan(values["residual"]):
        values = {key: value for key, value in values.items() if key not in _MEASURED_ONLY}
    return {key: value for key, value in values.items() if key in ("loss", "grad_norm") or not math.isnan(value)}


def _nan(device: torch.device) -> Tensor:
    return torch.full((), math.nan, device=device)


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(row: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in row]
