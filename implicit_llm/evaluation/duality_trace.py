"""Convergence by iteration: the simultaneous iteration of an implicit model, followed to the end of its budget.

    z_0 = 0,   z_i = (1 - tau) z_{i-1} + tau f(z_{i-1})

Evaluation i of f gives the residual ||f(z_{i-1}) - z_{i-1}|| / ||f(z_{i-1})|| and, as the closing evaluation after
i - 1 iterations, the prediction from f(z_{i-1}): what the model would answer with a budget of i. Nothing stops here,
and no earlier iterate is kept for its lower residual, as the solver would.

Shapes: `B` batch, `L` length, `D` model, `G` evaluations of f that are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.evaluation import answers as reading
from implicit_llm.evaluation.loss_tally import position_bins
from implicit_llm.evaluation.solver_tally import finite
from implicit_llm.solver.residual import sequence_rule
from implicit_llm_contracts.config.solver import SolverConfig

QUANTILES = {"median": 0.5, "q90": 0.9}


@dataclass(frozen=True)
class Trace:
    """residual_GB by sequence, residual_GBL by token, predictions_GBL: the most likely next tokens."""

    residual_GB: np.ndarray
    residual_GBL: np.ndarray
    predictions_GBL: np.ndarray


class TracedModel(nn.Module):
    """A model whose output is the trace of its simultaneous iteration; its solver is not asked and stays as it is."""

    def __init__(self, model: Any, solver: SolverConfig) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.solver = solver
        self.evaluations = looked_at(solver.eval_budget)

    def forward(self, input_ids: Tensor) -> Trace:
        base, wanted = self.model.base, set(self.evaluations)
        embedding_BLD = base.get_input_embeddings()(input_ids)
        x = base.stack_input(embedding_BLD, None, None, None)
        measure = sequence_rule(self.solver.tol)
        z_BLD = torch.zeros_like(embedding_BLD)
        by_sequence, by_token, predictions = [], [], []
        for evaluation in range(1, self.solver.eval_budget + 1):
            fz_BLD = base.apply_stack(z_BLD, x)[0]
            if evaluation in wanted:
                progress = measure(z_BLD, fz_BLD)
                by_sequence.append(progress.residual_B)
                by_token.append(progress.residual_BL)
                predictions.append(self._predict(fz_BLD))
            z_BLD = torch.lerp(z_BLD, fz_BLD, self.solver.tau)
        if not bool(torch.isfinite(z_BLD).all()):
            raise FloatingPointError("the simultaneous iteration became NaN or infinite; no convergence is reported")
        return Trace(*(torch.stack(parts).cpu().numpy() for parts in (by_sequence, by_token, predictions)))

    def _predict(self, hidden_BLD: Tensor) -> Tensor:
        step = max(1, reading.LOSS_TOKENS // len(hidden_BLD))
        parts = hidden_BLD.split(step, dim=1)
        return torch.cat([self.model.lm_head(part_BLD).argmax(-1) for part_BLD in parts], dim=1)


@dataclass
class TraceTally:
    """Traces of all batches together; `tol` is the solver's."""

    evaluations: tuple[int, ...]
    tol: float
    by_sequence: list[np.ndarray] = field(default_factory=list)
    by_token: list[np.ndarray] = field(default_factory=list)
    num_equal: np.ndarray = field(init=False)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_equal = np.zeros(len(self.evaluations), dtype=np.int64)

    def add(self, trace: Trace) -> None:
        shape = (len(self.evaluations), -1)
        self.by_sequence.append(trace.residual_GB.astype(np.float32))
        self.by_token.append(trace.residual_GBL.reshape(shape).astype(np.float32))
        same_GBL = trace.predictions_GBL == trace.predictions_GBL[-1:]
        self.num_equal += same_GBL.reshape(shape).sum(axis=1)
        self.num_tokens += same_GBL[0].size

    def values(self) -> dict[str, list[Any]]:
        """The curve by the number of f-evaluations: quantiles of the residual, share of tokens at or above tol, share
        of predictions equal to those of the last evaluation."""
        residuals = {"sequence": np.concatenate(self.by_sequence, 1), "token": np.concatenate(self.by_token, 1)}
        curve: dict[str, list[Any]] = {"f_evaluations": list(self.evaluations)}
        for over, residual_GN in residuals.items():
            for name, quantile in QUANTILES.items():
                values = np.quantile(residual_GN.astype(np.float64), quantile, axis=1)
                curve[f"residual_{over}_{name}"] = [finite(value) for value in values.tolist()]
        curve["unconverged_share"] = (residuals["token"] >= self.tol).mean(axis=1).tolist()
        curve["agreement_with_last"] = (self.num_equal / self.num_tokens).tolist()
        return curve


def looked_at(budget: int) -> tuple[int, ...]:
    """The evaluations of f that are looked at: all up to eight, then four to each doubling, and the last."""
    return tuple(sorted({*position_bins(budget).tolist(), budget}))
