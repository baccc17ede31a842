"""The modes of one model compared on rows of one length, and the convergence of its simultaneous iteration."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import EvaluationJob, Sequences, answers
from implicit_llm.evaluation.duality_modes import AllModes, pairs_of
from implicit_llm.evaluation.duality_tally import DualityTally, compare, is_finite
from implicit_llm.evaluation.duality_trace import TracedModel, TraceTally
from implicit_llm_jobs.progress import Progress

log = logging.getLogger(__name__)

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
