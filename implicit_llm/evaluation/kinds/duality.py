"""Whether the modes of one model agree on the same tokens, and how fast its simultaneous iteration converges.

An implicit model reads the same tokens in each of its modes. An explicit model reads them in parallel and token by
token with its cache: the two agree but for rounding, which says how much of an implicit model's difference is
arithmetic.

Convergence by iteration follows the simultaneous iteration of an implicit model to the end of its budget:

    z_0 = 0,   z_i = (1 - tau) z_{i-1} + tau f(z_{i-1})

Evaluation i of f gives the residual ||f(z_{i-1}) - z_{i-1}|| / ||f(z_{i-1})|| and, as the closing evaluation after
i - 1 iterations, the prediction from f(z_{i-1}): what the model would answer with a budget of i. Nothing stops here,
and no earlier iterate is kept for its lower residual, as the solver would.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary, `G` evaluations of f that are looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.evaluation import answers as reading
from implicit_llm.evaluation.answers import Batch, BatchSize, Evaluation, EvaluationJob, answers
from implicit_llm.evaluation.frame import ModelEvaluation, Record
from implicit_llm.evaluation.inputs import data_inputs, reads_of_inputs
from implicit_llm.evaluation.tallies import SolverTally, finite, position_bins
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.solver.residual import make_rule
from implicit_llm_contracts.config.evaluation import (
    PARALLEL,
    SEQUENTIAL,
    DualityConfig,
    EvaluateConfigError,
    ModeConfig,
)
from implicit_llm_contracts.config.solver import SolverConfig, solver_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import Sequences, open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 65536  # token by token a small batch takes as long as a large one
PAIR, CONVERGENCE = "pair", "convergence"  # the field `measure` of a record
SO_FAR = "so-far"
KEEP_EVERY_S = 60.0
SIMULTANEOUS = "simultaneous"


def run(context: StageContext) -> StageResult:
    """Body of the stage evaluate: writes metrics.json. Raises: UserError."""
    config = fill(DualityConfig, context.config, f"evaluate/{context.name}")
    test_sets = data_inputs(context)
    evaluation = ModelEvaluation(
        context,
        config,
        tracked=("token_agreement", "logit_distance_mean", "kl"),
        place=lambda record: (f"{record['data']}.L{record['length']}", f"{record['mode']}-{record['against']}"),
    )
    comparison = Comparison(evaluation, config)
    for role, source in test_sets.items():
        for length in sorted(config.lengths) if config.lengths else (None,):
            rows = open_dataset(source.work, length=length)
            about, where = {"data": role, "length": rows.length}, f"{role}-L{rows.length}"
            records = comparison.pair_records(rows, where) + comparison.trace_records(rows, where)
            evaluation.add_records(about | record for record in records)
    # Agreement with the sequential mode, which is that of generation.
    pairs = [record for record in evaluation.records if record["against"] == SEQUENTIAL]
    agreement = {".".join(evaluation.place(record)): record["token_agreement"] for record in pairs}
    return evaluation.finish({"token_agreement": agreement})


@dataclass(frozen=True)
class Comparison:
    """A model whose modes are compared; `where` names rows in the log and among what is kept."""

    evaluation: ModelEvaluation
    config: DualityConfig

    def pair_records(self, rows: Sequences, where: str) -> list[Record]:
        """One a pair of modes; without numbers where the modes cannot be compared."""
        evaluation = self.evaluation
        tally = self._tally(rows, where)
        settings = {mode.name: mode.record(evaluation.solver) for mode in evaluation.modes}
        records = []
        for mode, against in pairs_of(evaluation.modes, is_implicit=evaluation.solver is not None):
            pair = tally.pairs.get((mode, against), PairTally())
            cost, reference_cost = (tally.solvers.get(name, SolverTally()) for name in (mode, against))
            values = pair.values() | cost.values()
            values["against_f_evaluations_per_token"] = reference_cost.f_evaluations_per_token
            values["nonfinite_share"] = tally.num_nonfinite_rows / tally.num_rows if tally.num_rows else None
            records.append({"measure": PAIR, "mode": mode, "against": against, **settings[mode], **values})
        return records

    def trace_records(self, rows: Sequences, where: str) -> list[Record]:
        """The convergence of the simultaneous iteration in the settings of the first such mode; none if explicit."""
        trained = self.evaluation.solver
        modes = [mode for mode in self.evaluation.modes if mode.eval_mode == SIMULTANEOUS and mode.sweep is None]
        if trained is None or not modes:
            return []
        solver = modes[0].solver(trained)
        num_rows = min(self._num_rows(rows), max(1, self.config.trace_tokens // rows.length))
        tally = trace_convergence(self._job(rows, where, num_rows, None), solver) if num_rows else None
        curve = None if tally is None else tally.values()
        record = {"measure": CONVERGENCE, "mode": modes[0].name, "against": None, **modes[0].record(trained)}
        return [
            record
            | {"f_evaluations_per_token": float(solver.eval_budget), "residual": None, "convergence": curve}
            | {"unconverged_share": None if curve is None else curve["unconverged_share"][-1]}
            | {"num_tokens": 0 if tally is None else tally.num_tokens}
        ]

    def _num_rows(self, rows: Sequences) -> int:
        limits = [mode.max_samples for mode in self.config.modes if mode.max_samples is not None]
        if self.config.max_tokens is not None:
            limits.append(max(1, self.config.max_tokens // rows.length))
        return min([len(rows), *limits])

    def _job(self, rows: Sequences, where: str, num_rows: int, fixed: int | None) -> EvaluationJob:
        """`fixed` is the batch size that the modes require, if they do."""
        size = BatchSize(fixed or self.evaluation.batch_size or max(1, BATCH_TOKENS // rows.length), fixed is not None)
        return EvaluationJob(self.evaluation.model, rows, num_rows, size, where, self.config.precision)

    def _tally(self, rows: Sequences, where: str) -> DualityTally:
        """Empty where there is nothing to compare."""
        model, num_rows = self.evaluation.model, self._num_rows(rows)
        if num_rows == 0:
            log.warning("%s: has no row of %d tokens; its numbers are missing", where, rows.length)
        elif self.evaluation.solver is None and not goes_by_token(model):
            log.warning(
                "%s: a %s cannot be read token by token here; its numbers are missing", where, model.config.model_type
            )
        else:
            kept = self.evaluation.kept(where, SO_FAR)
            begun = DualityTally() if kept is None else DualityTally.from_dict(kept.values)
            if begun.num_rows:
                log.info("%s: %d rows taken from before the restart", where, begun.num_rows)
            job = self._job(rows, where, num_rows, self._coupled_batch_size())
            return compare_modes(job, self.evaluation.modes, begun, partial(self._keep, where))
        return DualityTally()

    def _keep(self, where: str, tally: DualityTally) -> None:
        try:
            self.evaluation.keep(where, SO_FAR, Evaluation(tally.to_dict()))
        except ValueError:  # a NaN or infinity is no JSON: the rows are read again
            log.info("%s: not kept for a restart, for it has numbers that are not finite", where)

    def _coupled_batch_size(self) -> int | None:
        """The one that the modes ask for, None if none does. Raises: EvaluateConfigError where they differ."""
        asked = {mode.name: mode.coupled_batch_size(self.evaluation.solver) for mode in self.evaluation.modes}
        sizes = {name: size for name, size in asked.items() if size is not None}
        if len(set(sizes.values())) > 1:
            raise EvaluateConfigError(
                f"modes: all are compared on the same batches, and the batch sizes differ ({sizes}); "
                "give them the same batch_size"
            )
        return next(iter(sizes.values()), None)


def compare_modes(
    job: EvaluationJob,
    modes: Sequence[ModeConfig],
    tally: DualityTally | None = None,
    keep: Callable[[DualityTally], None] = lambda tally: None,
) -> DualityTally:
    """Read the rows in every mode, on from those in `tally`, which `keep` gets once a minute and at the end.

    Rows on which a mode became NaN or infinite are only counted.
    Raises: EvaluationOutOfMemory.
    """
    tally, progress, kept_s = tally or DualityTally(), Progress(job.where, job.num_samples), time.monotonic()
    pairs = pairs_of(modes, is_implicit=solver_of(job.model) is not None)

    def read(outputs: Any, batch: Batch) -> Any:
        # Nothing is counted here: a batch that does not fit is tried again in halves.
        return (outputs, compare(outputs, pairs)) if is_finite(outputs) else None

    for num_read, batch, answer in answers(job, read, partial(all_modes, job.model, modes), tally.num_rows):
        tally.num_rows = num_read
        if answer is None:
            tally.num_nonfinite_rows += len(batch["input_ids"])
        else:
            tally.add(*answer)
        progress.tell(tally.num_rows, lambda: _words(tally))
        if time.monotonic() - kept_s > KEEP_EVERY_S:
            keep(tally)
            kept_s = time.monotonic()
    keep(tally)
    if tally.num_nonfinite_rows:
        counts = (tally.num_nonfinite_rows, job.num_samples)
        log.warning("%s: %d of %d rows became NaN or infinite in some mode and are left out", job.where, *counts)
    return tally


def trace_convergence(job: EvaluationJob, solver: SolverConfig) -> TraceTally | None:
    """The convergence of the simultaneous iteration; None when it became NaN or infinite.

    Raises: EvaluationOutOfMemory.
    """
    tally = TraceTally(looked_at(solver.eval_budget), solver.tol)
    progress = Progress(job.where, job.num_samples)
    for num_read, _, traced in answers(job, lambda traced, batch: traced, partial(trace, job.model, solver)):
        if traced is None:
            return None
        tally.add(traced)
        progress.tell(num_read, lambda: f"{len(tally.evaluations)} evaluations looked at")
    return tally


def _words(tally: DualityTally) -> str:
    shares = {"|".join(key): pair.values()["token_agreement"] for key, pair in tally.pairs.items()}
    return ", ".join(f"{key} {share:.4f}" for key, share in shares.items()) or "nothing finite yet"


# How near a mode is to generation: the nearer one of a pair is the reference.
_NEARNESS = {"sequential": 0, "blockwise": 1, "simultaneous": 2, "as_trained": 3}


@dataclass(frozen=True)
class ModeOutput:
    """Hidden states (B, L, D), or logits (B, L, V) where `head` is None; the solver's statistics, None if explicit."""

    states: Tensor
    head: nn.Module | None
    stats: Any

    def logits(self, positions: slice) -> Tensor:
        """fp32 logits at some positions."""
        states = self.states[:, positions]
        return (states if self.head is None else self.head(states)).float()


def all_modes(model: Any, modes: Sequence[ModeConfig], input_ids: Tensor) -> dict[str, ModeOutput]:
    """The output in every mode, by name; the model's solver stays as it was."""
    trained = solver_of(model)
    if trained is None:
        by_token = mode_output(model, input_ids, is_by_token=True)
        return {PARALLEL: mode_output(model, input_ids), SEQUENTIAL: by_token}
    found = {}
    try:
        for mode in modes:
            model.solver = mode.solver(trained)
            found[mode.name] = mode_output(model, input_ids)
    finally:
        model.solver = trained
    return found


def mode_output(model: Any, input_ids: Tensor, *, is_by_token: bool = False) -> ModeOutput:
    """One pass over all tokens, or one for each of them with the cache of those before."""
    is_own = isinstance(model, ImplicitForCausalLM)
    inner = model.base if is_own else model
    head = model.lm_head if is_own else None
    key = "last_hidden_state" if is_own else "logits"
    if not is_by_token:
        out = inner(input_ids=input_ids)
        return ModeOutput(getattr(out, key), head, getattr(out, "solver_stats", None))
    cache, states = None, []
    for position in range(input_ids.shape[1]):
        token = input_ids[:, position : position + 1]
        out = inner(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        states.append(getattr(out, key))
    return ModeOutput(torch.cat(states, dim=1), head, None)


def pairs_of(modes: Sequence[ModeConfig], *, is_implicit: bool) -> list[tuple[str, str]]:
    """Every two modes, the reference second: the one nearer to generation, of equals the one named first.

    Of a sweep, modes with the same value of the same setting.
    """
    if not is_implicit:
        return [(PARALLEL, SEQUENTIAL)]
    ordered = sorted(modes, key=lambda mode: _NEARNESS[mode.eval_mode])
    pairs = [(mode, other) for index, other in enumerate(ordered) for mode in ordered[index + 1 :]]
    return [(mode.name, other.name) for mode, other in pairs if _swept(mode) == _swept(other)]


def _swept(mode: ModeConfig) -> tuple[str, float] | None:
    return None if mode.sweep is None else (mode.sweep.key, mode.sweep.value)


def goes_by_token(model: Any) -> bool:
    """Whether an explicit model can be read token by token here: it returns its cache as `past_key_values`."""
    token = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        return getattr(model(input_ids=token, use_cache=True), "past_key_values", None) is not None


MEASURES = ("token_agreement", "logit_distance_mean", "logit_distance_max", "logit_std", "kl")
Pair = tuple[str, str]  # a mode and its reference


@dataclass
class PairTally:
    """Sums over tokens; distances and spread are means over the vocabulary first.

    sums: tokens, those with equal predictions, distance, spread of the reference, divergence.
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros(5))
    distance_max: float = 0.0

    def add(self, logits_BLV: Tensor, reference_BLV: Tensor) -> None:
        difference_BLV = (logits_BLV - reference_BLV).abs()
        log_shares_BLV, log_reference_BLV = logits_BLV.log_softmax(-1), reference_BLV.log_softmax(-1)
        kl_BL = (log_reference_BLV.exp() * (log_reference_BLV - log_shares_BLV)).sum(-1)
        is_equal_BL = logits_BLV.argmax(-1) == reference_BLV.argmax(-1)
        columns = (torch.ones_like(kl_BL), is_equal_BL, difference_BLV.mean(-1), reference_BLV.std(-1), kl_BL)
        self.sums += [float(column_BL.double().sum()) for column_BL in columns]
        self.distance_max = max(self.distance_max, float(difference_BLV.max()))

    def merge(self, other: PairTally) -> None:
        """Count what `other` has counted too."""
        self.sums += other.sums
        self.distance_max = max(self.distance_max, other.distance_max)

    def values(self) -> dict[str, Any]:
        """token_agreement: share of tokens with the same most likely next token. kl: of the mode from the reference,
        nats a token. logit_std: of the reference over the vocabulary, what a distance is to be compared with."""
        num_tokens, *sums = self.sums.tolist()
        if not num_tokens:
            return dict.fromkeys(MEASURES) | {"num_tokens": 0}
        agreement, distance, spread, divergence = (total / num_tokens for total in sums)
        return {
            "token_agreement": agreement,
            "logit_distance_mean": finite(distance),
            "logit_distance_max": finite(self.distance_max),
            "logit_std": finite(spread),
            "kl": finite(max(0.0, divergence)),
            "num_tokens": int(num_tokens),
        }


@dataclass
class DualityTally:
    """All pairs of modes, and what each mode cost, over the first `num_rows` rows."""

    pairs: dict[Pair, PairTally] = field(default_factory=dict)
    solvers: dict[str, SolverTally] = field(default_factory=dict)
    num_rows: int = 0
    num_nonfinite_rows: int = 0

    def add(self, outputs: Mapping[str, ModeOutput], compared: Mapping[Pair, PairTally]) -> None:
        """Count a batch; `compared` is what `compare` made of it."""
        for name, output in outputs.items():
            batch, length = output.states.shape[:2]
            self.solvers.setdefault(name, SolverTally()).add(output.stats, (batch, length))
        for key, tally in compared.items():
            self.pairs.setdefault(key, PairTally()).merge(tally)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives an equal tally back."""
        pairs = [[*key, tally.sums.tolist(), tally.distance_max] for key, tally in self.pairs.items()]
        return asdict(replace(self, pairs={})) | {"pairs": pairs}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DualityTally:
        pairs = {(mode, against): PairTally(np.array(sums), most) for mode, against, sums, most in values["pairs"]}
        solvers = {name: SolverTally(**fields) for name, fields in values["solvers"].items()}
        return cls(pairs, solvers, values["num_rows"], values["num_nonfinite_rows"])


def compare(outputs: Mapping[str, ModeOutput], pairs: Iterable[Pair]) -> dict[Pair, PairTally]:
    """The pairs of modes on one batch, a piece of the positions at a time."""
    found = {key: PairTally() for key in pairs}
    batch, length = next(iter(outputs.values())).states.shape[:2]
    step = max(1, reading.LOSS_TOKENS // (batch * len(outputs)))
    for start in range(0, length, step):
        logits = {name: output.logits(slice(start, start + step)) for name, output in outputs.items()}
        for (mode, reference), tally in found.items():
            tally.add(logits[mode], logits[reference])
    return found


def is_finite(outputs: Mapping[str, ModeOutput]) -> bool:
    """Whether no mode has a NaN or infinite state."""
    return all(bool(torch.isfinite(output.states).all()) for output in outputs.values())


QUANTILES = {"median": 0.5, "q90": 0.9}


@dataclass(frozen=True)
class Trace:
    """residual_GB by sequence, residual_GBL by token, predictions_GBL: the most likely next tokens."""

    residual_GB: np.ndarray
    residual_GBL: np.ndarray
    predictions_GBL: np.ndarray


def trace(model: Any, solver: SolverConfig, input_ids: Tensor) -> Trace:
    """The simultaneous iteration by the settings of `solver`; that of the model is not asked.

    Raises: FloatingPointError.
    """
    base, wanted = model.base, set(looked_at(solver.eval_budget))
    embedding_BLD = base.get_input_embeddings()(input_ids)
    x = base.stack_input(embedding_BLD, None, None, None)
    measure = make_rule("sequence", solver.tol, is_training=False)
    z_BLD = torch.zeros_like(embedding_BLD)
    by_sequence, by_token, predictions = [], [], []
    for evaluation in range(1, solver.eval_budget + 1):
        fz_BLD = base.apply_stack(z_BLD, x)[0]
        if evaluation in wanted:
            progress = measure(z_BLD, fz_BLD)
            by_sequence.append(progress.residual_B)
            by_token.append(progress.residual_BL)
            parts = fz_BLD.split(max(1, reading.LOSS_TOKENS // len(fz_BLD)), dim=1)
            predictions.append(torch.cat([model.lm_head(part_BLD).argmax(-1) for part_BLD in parts], dim=1))
        z_BLD = torch.lerp(z_BLD, fz_BLD, solver.tau)
    if not bool(torch.isfinite(z_BLD).all()):
        raise FloatingPointError("the simultaneous iteration became NaN or infinite; no convergence is reported")
    return Trace(*(torch.stack(parts).cpu().numpy() for parts in (by_sequence, by_token, predictions)))


@dataclass
class TraceTally:
    """Traces of all batches together; `tol` is the solver's."""

    evaluations: tuple[int, ...]
    tol: float
    by_sequence: list[np.ndarray] = field(default_factory=list)
    by_token: list[np.ndarray] = field(default_factory=list)
    is_final: list[np.ndarray] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        shape = (len(self.evaluations), -1)
        self.by_sequence.append(trace.residual_GB.astype(np.float32))
        self.by_token.append(trace.residual_GBL.reshape(shape).astype(np.float32))
        self.is_final.append((trace.predictions_GBL == trace.predictions_GBL[-1:]).reshape(shape))

    @property
    def num_tokens(self) -> int:
        return sum(is_final_GN.shape[1] for is_final_GN in self.is_final)

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
        curve["agreement_with_last"] = np.concatenate(self.is_final, 1).mean(axis=1).tolist()
        return curve


def looked_at(budget: int) -> tuple[int, ...]:
    """The evaluations of f that are looked at: all up to eight, then four to each doubling, and the last."""
    return tuple(sorted({*position_bins(budget).tolist(), budget}))
