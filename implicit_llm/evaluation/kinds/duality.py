"""Whether the modes of one model agree on the same tokens, and how fast its simultaneous iteration converges."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob, answers
from implicit_llm.evaluation.frame import ModelEvaluation, Record
from implicit_llm.evaluation.inputs import data_inputs, reads_of_inputs
from implicit_llm.evaluation.kinds.duality_measures import (
    DualityTally,
    PairTally,
    TraceTally,
    all_modes,
    compare,
    goes_by_token,
    is_finite,
    looked_at,
    pairs_of,
    trace,
)
from implicit_llm.evaluation.tallies import SolverTally
from implicit_llm_contracts.config.evaluation import SEQUENTIAL, DualityConfig, EvaluateConfigError, ModeConfig
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

    def read(outputs: Any, batch: dict[str, np.ndarray]) -> Any:
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
