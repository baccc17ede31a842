"""Whether the modes of one model agree on the same tokens, and how fast its simultaneous iteration converges."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob, Sequences, answers
from implicit_llm.evaluation.inputs import about_model, data_inputs, load_model, model_input, reads_of_inputs
from implicit_llm.evaluation.kinds.duality_measures import (
    AllModes,
    DualityTally,
    PairTally,
    TracedModel,
    TraceTally,
    compare,
    goes_by_token,
    is_finite,
    pairs_of,
)
from implicit_llm.evaluation.metrics_file import Record, tracked_name, write_metrics
from implicit_llm.evaluation.modes import PartialResults
from implicit_llm.evaluation.tallies import SolverTally
from implicit_llm_contracts.config.duality import DualityConfig
from implicit_llm_contracts.config.evaluation import (
    PARALLEL,
    SEQUENTIAL,
    EvaluateConfigError,
    ModeConfig,
    modes_of,
)
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 65536  # token by token a small batch takes as long as a large one
PAIR, CONVERGENCE = "pair", "convergence"  # the field `measure` of a record
SO_FAR = "so-far"
SIMULTANEOUS = "simultaneous"


@dataclass(frozen=True)
class Reading:
    """One data set at one length; `label` names it in the log and among what is kept."""

    label: str
    rows: Sequences
    num_rows: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A model with its modes, and how it is run."""

    model: Any
    modes: tuple[ModeConfig, ...]
    config: DualityConfig
    partial: PartialResults
    batch_size: int | None

    @property
    def coupled_batch_size(self) -> int | None:
        """The one that the modes ask for, None if none does. Raises: EvaluateConfigError where they differ."""
        solver = solver_of(self.model)
        asked = {} if solver is None else {mode.name: mode.coupled_batch_size(solver) for mode in self.modes}
        sizes = {name: size for name, size in asked.items() if size is not None}
        if len(set(sizes.values())) > 1:
            raise EvaluateConfigError(
                f"modes: all are compared on the same batches, and the batch sizes differ ({sizes}); "
                "give them the same batch_size"
            )
        return next(iter(sizes.values()), None)

    def job(self, reading: Reading, model: Any, num_rows: int, *, is_coupled: bool) -> EvaluationJob:
        """`model` stands for the model in another guise; a stopping rule that couples sequences fixes the batch."""
        fixed = self.coupled_batch_size if is_coupled else None
        size = fixed or self.batch_size or max(1, BATCH_TOKENS // reading.rows.length)
        batch = BatchSize(size, is_fixed=fixed is not None)
        return EvaluationJob(model, reading.rows, num_rows, batch, reading.label, self.config.precision)


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(DualityConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained, test_sets = model_input(context), data_inputs(context)
    model = load_model(trained, context.runtime)
    partial = PartialResults(context.work / "partial")
    comparison = Comparison(model, modes, config, partial, int(context.runtime.get("batch_size") or 0) or None)
    about = about_model(model, trained)
    records: list[Record] = []
    for role, source in test_sets.items():
        for length in sorted(config.lengths) if config.lengths else (None,):
            rows = open_dataset(source.work, length=length)
            described = {"kind": config.kind, "data": role, "length": rows.length, **about}
            reading = Reading(f"{role}-L{rows.length}", rows, _num_rows(rows, config), described)
            records += [*_pair_records(comparison, reading), *_trace_records(comparison, reading)]
            context.journal.metrics(len(records), _tracked(records))
    metrics = write_metrics(context.work, records)
    partial.discard()
    return StageResult([metrics], {"token_agreement": _headline(records)})


def _num_rows(rows: Sequences, config: DualityConfig) -> int:
    limits = [mode.max_samples for mode in config.modes if mode.max_samples is not None]
    if config.max_tokens is not None:
        limits.append(max(1, config.max_tokens // rows.length))
    return min([len(rows), *limits])


def _pair_records(comparison: Comparison, reading: Reading) -> list[Record]:
    """One a pair of modes; without numbers where the modes cannot be compared."""
    solver = solver_of(comparison.model)
    pairs = pairs_of(comparison.modes, is_implicit=solver is not None)
    tally = _tally(comparison, reading)
    settings = {mode.name: mode.record(solver) for mode in comparison.modes}
    if solver is None:
        settings = {PARALLEL: comparison.modes[0].record(None)}
    records = []
    for mode, against in pairs:
        measured = PairTally() if tally is None else tally.pair((mode, against))
        solvers = {} if tally is None else tally.solvers
        cost = solvers.get(mode, SolverTally()).values(solver is not None)
        reference_cost = solvers.get(against, SolverTally()).f_evaluations_per_token
        about_pair = {"measure": PAIR, "mode": mode, "against": against, **settings[mode]}
        values = measured.values() | cost | {"against_f_evaluations_per_token": reference_cost}
        values["nonfinite_share"] = tally.num_nonfinite_rows / tally.num_rows if tally and tally.num_rows else None
        records.append({**reading.about, **about_pair, **values})
    return records


def _tally(comparison: Comparison, reading: Reading) -> DualityTally | None:
    """From before a restart as far as it is there; None where there is nothing to compare."""
    if reading.num_rows == 0:
        log.warning("%s: has no row of %d tokens; its numbers are missing", reading.label, reading.rows.length)
        return None
    if solver_of(comparison.model) is None and not goes_by_token(comparison.model):
        kind = comparison.model.config.model_type
        log.warning("%s: a %s cannot be read token by token here; its numbers are missing", reading.label, kind)
        return None
    partial = comparison.partial
    kept = partial.find(reading.label, SO_FAR)
    begun = None if kept is None else DualityTally.from_dict(kept.values)
    if begun is not None:
        log.info("%s: %d rows taken from before the restart", reading.label, begun.num_rows)

    def keep(tally: DualityTally) -> None:
        if is_plain(tally):
            partial.keep(reading.label, SO_FAR, Evaluation(tally.to_dict()))

    in_all_modes = AllModes(comparison.model, comparison.modes)
    tally = compare_modes(comparison.job(reading, in_all_modes, reading.num_rows, is_coupled=True), begun, keep)
    keep(tally)
    return tally


def _trace_records(comparison: Comparison, reading: Reading) -> list[Record]:
    """The convergence of the simultaneous iteration in the settings of the first such mode; none if explicit."""
    trained = solver_of(comparison.model)
    mode = next((mode for mode in comparison.modes if mode.eval_mode == SIMULTANEOUS and mode.sweep is None), None)
    if trained is None or mode is None:
        return []
    traced = TracedModel(comparison.model, mode.solver(trained))
    num_rows = min(reading.num_rows, max(1, comparison.config.trace_tokens // reading.rows.length))
    job = comparison.job(reading, traced, num_rows, is_coupled=False)
    tally = trace_convergence(job) if num_rows else None
    curve = None if tally is None else tally.values()
    described = {"measure": CONVERGENCE, "mode": mode.name, "against": None, **mode.record(trained)}
    cost = {"f_evaluations_per_token": float(traced.solver.eval_budget), "residual": None, "unconverged_share": None}
    if curve is not None:
        cost["unconverged_share"] = curve["unconverged_share"][-1]
    num_tokens = 0 if tally is None else tally.num_tokens
    return [{**reading.about, **described, **cost, "convergence": curve, "num_tokens": num_tokens}]


def _pairs(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["measure"] == PAIR]


def _name(record: Record) -> str:
    return f"{record['data']}.L{record['length']}.{record['mode']}-{record['against']}"


def _tracked(records: Sequence[Record]) -> dict[str, float]:
    keys = ("token_agreement", "logit_distance_mean", "kl")
    return {
        tracked_name(key, _name(record)): record[key]
        for record in _pairs(records)
        for key in keys
        if record[key] is not None
    }


def _headline(records: Sequence[Record]) -> dict[str, float | None]:
    """Agreement with the sequential mode, which is that of generation."""
    return {_name(record): record["token_agreement"] for record in _pairs(records) if record["against"] == SEQUENTIAL}


KEEP_EVERY_S = 60.0


class RowsFrom:
    """The rows of a data set from number `start` on."""

    def __init__(self, dataset: Sequences, start: int) -> None:
        self._dataset, self._start = dataset, start
        self.length, self.vocab_size = dataset.length, dataset.vocab_size

    def __len__(self) -> int:
        return len(self._dataset) - self._start

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self._dataset.fetch(np.asarray(indices) + self._start)


def compare_modes(
    job: EvaluationJob,
    begun: DualityTally | None = None,
    keep: Callable[[DualityTally], None] = lambda tally: None,
) -> DualityTally:
    """Read the rows in every mode of `job.model`, an AllModes, from where the tally `begun` ended.

    `keep` is called with the tally about once a minute. Rows on which a mode became NaN or infinite are only counted.
    Raises: EvaluationOutOfMemory.
    """
    assert isinstance(job.model, AllModes)
    tally = begun or DualityTally.of(pairs_of(job.model.modes, is_implicit=job.is_implicit))
    progress = Progress(job.where, job.num_samples)
    first = tally.num_rows
    rest = replace(job, dataset=RowsFrom(job.dataset, first), num_samples=job.num_samples - first)
    kept_s = time.monotonic()

    def read(outputs: Any, batch: dict[str, np.ndarray]) -> Any:
        # Nothing is counted here: a batch that does not fit is tried again in halves.
        return (outputs, compare(outputs, tally.pairs)) if is_finite(outputs) else None

    for start, batch, answer in answers(rest, read):
        size = len(batch["input_ids"])
        tally.num_rows = first + start + size
        if answer is None:
            tally.num_nonfinite_rows += size
        else:
            tally.add(*answer)
        progress.tell(tally.num_rows, lambda: _words(tally))
        if time.monotonic() - kept_s > KEEP_EVERY_S:
            keep(tally)
            kept_s = time.monotonic()
    if tally.num_nonfinite_rows:
        counts = (tally.num_nonfinite_rows, job.num_samples)
        log.warning("%s: %d of %d rows became NaN or infinite in some mode and are left out", job.where, *counts)
    return tally


def trace_convergence(job: EvaluationJob) -> TraceTally | None:
    """The convergence of `job.model`, a TracedModel; None when an iteration became NaN or infinite.

    Raises: EvaluationOutOfMemory.
    """
    assert isinstance(job.model, TracedModel)
    tally = TraceTally(job.model.evaluations, job.model.solver.tol)
    progress = Progress(job.where, job.num_samples)
    for start, batch, trace in answers(job, lambda trace, batch: trace):
        if trace is None:
            return None
        tally.add(trace)
        progress.tell(start + len(batch["input_ids"]), lambda: f"{len(tally.evaluations)} evaluations looked at")
    return tally


def is_plain(tally: DualityTally) -> bool:
    """Whether the tally can be kept as JSON: it holds no NaN or infinity."""
    try:
        json.dumps(tally.to_dict(), allow_nan=False)
    except ValueError:
        return False
    return True


def _words(tally: DualityTally) -> str:
    shares = {key: pair.values()["token_agreement"] for key, pair in tally.pairs.items()}
    return ", ".join(f"{key} {share:.4f}" for key, share in shares.items() if share is not None) or "nothing finite yet"
