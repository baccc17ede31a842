"""Collect training metrics on the device without waiting for it; read them when they are logged or saved.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from implicit_llm.analysis.spectral_radius import spectral_radius
from implicit_llm.training.distributed import max_tensor_over_ranks, mean_over_ranks
from implicit_llm_contracts.config.flops import training_flops
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.config.tasks import TaskKind
from implicit_llm_data.shards import IGNORED_LABEL

RECENT_STEPS = 50
# These are measured about ten times in a curriculum, by `look_at_fixed_point`.
OCCASIONAL = ("mode_gap", "spectral_radius")
_SUMMED = ("loss", "right", "scored")  # sums over micro-batches; right and scored count positions
_SOLVER = ("num_iter", "f_evaluations", "residual", "unconverged_share")
_OF_STEP = (*_SUMMED, *_SOLVER, "carried_share", "grad_norm", *OCCASIONAL)  # on the device until `pull`
_RESIDUAL = _OF_STEP.index("residual")
Row = dict[str, float]  # the metrics of a step by column; a metric that was not measured is NaN or missing


@dataclass
class Totals:
    """The totals up to a step, which every checkpoint contains.

    skipped_updates: the number of updates that were skipped because fp16 gradients overflowed. skipped_in_a_row: how
    many updates in a row were skipped, up to the newest one.
    """

    tokens: int = 0
    flops: float = 0.0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0


Cost = Callable[[float], float]  # maps the evaluations of f per token (NaN if not counted) to FLOPs per token


def cost_per_token(model: PreTrainedModel, length: int) -> Cost:
    """Return a function from evaluations of f per token to training FLOPs per token; NaN means the solver's maximum."""
    fields, solver = {**model.config.to_dict(), "num_parameters": model.num_parameters()}, solver_of(model)
    return lambda number: training_flops(fields, length, solver, number if math.isfinite(number) else None)


class StepMetrics:
    """The metrics of a phase, one row of `columns` per step.

    loss: the mean over the labels of the global batch. accuracy: the task's accuracy on the training batch. num_iter:
    solver iterations per token; f_evaluations: these plus closing, phantom and unrolled steps; both are means over
    sequences. residual: the largest of the batch. unconverged_share: the share of tokens that did not converge.
    carried_share: the share of sequences that start in a carried state (state passing). mode_gap, spectral_radius: see
    `look_at_fixed_point`. totals: the totals up to the last row that was pulled.
    """

    def __init__(self, task: TaskKind, tokens: int = 0, cost: Cost = lambda number: 0.0) -> None:
        """Create empty metrics; `tokens` is the number of tokens per step."""
        self.totals = Totals()
        self._accuracy, self._last_tokens = task.accuracy or ("accuracy", 0)
        self.columns = ("loss", "grad_norm", self._accuracy, *_SOLVER, "carried_share", *OCCASIONAL)
        self._tokens, self._cost = tokens, cost
        self._micro: list[Tensor] = []
        self._occasional: dict[str, Tensor] = {}
        self._pending: list[Tensor] = []
        self._window: list[Row] = []
        self._recent: deque[Row] = deque(maxlen=RECENT_STEPS)

    @property
    def measures_accuracy(self) -> bool:
        """Whether the task has an accuracy; without an accuracy, `add` needs no logits."""
        return self._last_tokens != 0

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        logits_BLV: Tensor | None,
        labels_BL: Tensor,
        stats: Any,
        carried_share: Tensor | None = None,
    ) -> None:
        """Count a micro-batch; `stats` are SolverStats or None.

        loss: the micro-batch's share of the step's loss, times the number of ranks, because `pull` returns means over
        ranks. Logits are needed only to measure an accuracy, `carried_share` only with state passing.
        """
        row = [loss.detach().float(), *self._right_and_scored(logits_BLV, labels_BL)]
        if stats is None:
            row += [_nan(loss.device)] * len(_SOLVER)
        else:
            num_iter = stats.num_iter.float().mean()
            unconverged = stats.unconverged_tokens.sum() / labels_BL.numel()
            row += [num_iter, num_iter + stats.num_closing, stats.residual.float().amax(), unconverged]
        row.append(_nan(loss.device) if carried_share is None else carried_share)
        self._micro.append(torch.stack(row))

    def add_occasional(self, values: Mapping[str, Tensor]) -> None:
        """Add metrics of OCCASIONAL to the row of the current step."""
        self._occasional |= {name: value.detach().float() for name, value in values.items()}

    def close_step(self, grad_norm: Tensor) -> Tensor:
        """End the step; return its loss on this rank and its gradient norm, shape (2,)."""
        row, norm = self._micro[0], grad_norm.detach().float()
        if len(self._micro) > 1:
            rows, summed = torch.stack(self._micro), len(_SUMMED)
            row = torch.cat((rows[:, :summed].sum(0), rows[:, summed:].mean(0)))
            row[_RESIDUAL] = rows[:, _RESIDUAL].amax()
        occasional = [self._occasional.get(name, _nan(row.device)) for name in OCCASIONAL]
        self._pending.append(torch.cat((row, torch.stack([norm, *occasional]))))
        self._micro, self._occasional = [], {}
        return torch.stack((row[0], norm))

    def pull(self) -> list[Row]:
        """Wait for the device; return the rows of the steps closed since the last pull, and add them to `totals`.

        Collective.
        """
        if not self._pending:
            return []
        pending, totals = torch.stack(self._pending), self.totals
        found = mean_over_ranks(pending)
        found[:, _RESIDUAL] = max_tensor_over_ranks(pending[:, _RESIDUAL])
        self._pending = []
        rows = [dict(zip(_OF_STEP, row, strict=True)) for row in found.tolist()]
        for row in rows:
            right, scored = row.pop("right"), row.pop("scored")
            row[self._accuracy] = right / scored if scored > 0 else math.nan
            totals.tokens += self._tokens
            totals.flops += self._tokens * self._cost(row["f_evaluations"])
            is_skipped = not math.isfinite(row["grad_norm"])
            totals.skipped_updates += is_skipped
            totals.skipped_in_a_row = totals.skipped_in_a_row + 1 if is_skipped else 0
        self._window += rows
        self._recent.extend(rows)
        return rows

    def drain(self) -> dict[str, float]:
        """Return the mean of each column over the rows pulled since the last drain."""
        rows, self._window = self._window, []
        return self._means(rows)

    def recent(self) -> dict[str, float]:
        """Return the mean of each column over the last RECENT_STEPS steps, without the metrics of OCCASIONAL."""
        return {key: value for key, value in self._means(self._recent).items() if key not in OCCASIONAL}

    def recent_rows(self) -> list[Row]:
        """Return the rows of the last RECENT_STEPS steps, each without its non-finite values."""
        return _finite(self._recent)

    def state(self) -> dict[str, Any]:
        """Return totals, rows not yet drained and recent rows as JSON values; call `pull` first."""
        return {"window": _finite(self._window), "recent": self.recent_rows(), "totals": asdict(self.totals)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the metrics must have no rows yet."""
        self._window = list(state["window"])
        self._recent.extend(state["recent"])
        self.totals = Totals(**state["totals"])

    def start_phase(self) -> None:
        """Delete the rows of an earlier phase, but keep the totals."""
        self._window = []
        self._recent.clear()

    def _right_and_scored(self, logits_BLV: Tensor | None, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of right predictions and labels at scored positions; NaN if the task has no accuracy."""
        if not self.measures_accuracy:
            return _nan(labels_BL.device), _nan(labels_BL.device)
        assert logits_BLV is not None
        first = 0 if self._last_tokens is None else -self._last_tokens
        labels_BL = labels_BL[:, first:]
        is_right = logits_BLV[:, first:].argmax(-1) == labels_BL
        return is_right.sum().float(), (labels_BL != IGNORED_LABEL).sum().float()

    def _means(self, rows: Iterable[Row]) -> dict[str, float]:
        """Return the mean of the finite values of each column, and NaN for a loss or grad_norm without any.

        The result is empty without rows. If no row has a residual, which unrolled steps do not measure, num_iter and
        unconverged_share are omitted too.
        """
        finite = _finite(rows)
        columns = {name: [row[name] for row in finite if name in row] for name in self.columns}
        if not columns["residual"]:
            columns |= {"num_iter": [], "unconverged_share": []}
        always = ("loss", "grad_norm") if finite else ()
        return {
            name: float(np.mean(found)) if found else math.nan
            for name, found in columns.items()
            if found or name in always
        }


def _finite(rows: Iterable[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if math.isfinite(value)} for row in rows]


def _nan(device: torch.device) -> Tensor:
    return torch.full((), math.nan, device=device)


# By default, a block in evaluation mode takes up to 4 x `max_iter` evaluations of f. As long as the solver does not
# converge, many sequences would cost minutes, so both metrics use few. The model is causal: later tokens do not change
# a token's loss, so the first tokens of a sequence suffice.
SEQUENCES, POSITIONS = 8, 512
RADIUS_SEQUENCES, RADIUS_POSITIONS = 4, 128
RADIUS_PRODUCTS = 40  # one backward pass each; on trained models, the error is at most a few percent
POINTS = 10  # measurements in a curriculum
_MIN_INTERVAL_STEPS = 5


def is_due(step: int, total_steps: int) -> bool:
    """Return whether to measure in step number `step`: about ten times in a curriculum, unless it is very short."""
    return step % max(_MIN_INTERVAL_STEPS, total_steps // POINTS) == 0


@torch.no_grad()
def look_at_fixed_point(
    model: Any, inputs: dict[str, Any], outputs: Any, context: AbstractContextManager[Any]
) -> dict[str, Tensor]:
    """Return mode_gap and spectral_radius of an implicit model on the first tokens of a micro-batch's first sequences.

    mode_gap: the loss in evaluation mode minus the loss of the training pass with these `outputs`. spectral_radius:
    the largest |eigenvalue| of df/dz at the fixed point found in evaluation mode, as a mean over sequences.
    A metric is NaN if its evaluation becomes NaN or infinite. If this happens to mode_gap, spectral_radius is NaN too.
    Both metrics stay on the device. The random state and the gradients do not change; afterwards the model is in
    training mode. context: the autocast of training.
    """
    part = (slice(SEQUENCES), slice(POSITIONS))
    input_ids, labels_BL = inputs["input_ids"][part], inputs["labels"][part]
    some_ids, base = input_ids[:RADIUS_SEQUENCES, :RADIUS_POSITIONS], model.base
    found = dict.fromkeys(("mode_gap", "spectral_radius"), torch.full((), math.nan, device=labels_BL.device))
    model.eval()
    try:
        with context, suppress(FloatingPointError):
            # The training pass returned no logits if the task has no accuracy.
            trained_BLV = model.lm_head(outputs.last_hidden_state[part]) if outputs.logits is None else outputs.logits
            evaluated_BLV = model(input_ids=input_ids, use_cache=False).logits
            found["mode_gap"] = _loss(evaluated_BLV, labels_BL) - _loss(trained_BLV[part], labels_BL)
            del trained_BLV, evaluated_BLV  # they are large
            z_BLD = base(some_ids, use_cache=False).last_hidden_state
            x = base.stack_input(base.get_input_embeddings()(some_ids), None, None, None)
            found["spectral_radius"] = spectral_radius(base, x, z_BLD, num_products=RADIUS_PRODUCTS).float().mean()
    finally:
        model.train()
    return found


def _loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED_LABEL)
