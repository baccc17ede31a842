"""Evaluating a model in every mode, one after another; a restart goes on after the finished ones."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob, Sequences
from implicit_llm_contracts.config.evaluation import PARALLEL, ModeConfig
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.runs.atomic import write_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModeRunner:
    """A model with the modes it is evaluated in; an explicit model has the one mode "parallel".

    `job_options` are fields of EvaluationJob that all modes share. Runtime option: batch_size (sequences).
    """

    model: Any
    configured: tuple[ModeConfig, ...]
    partial: PartialResults
    runtime: Mapping[str, Any]
    job_options: Mapping[str, Any]

    @property
    def modes(self) -> tuple[ModeConfig, ...]:
        if solver_of(self.model) is not None:
            return self.configured
        return (ModeConfig(name=PARALLEL, eval_mode="simultaneous", sweep=self.configured[0].sweep),)

    def results(
        self,
        data: str,
        dataset: Sequences,
        evaluate: Callable[[EvaluationJob], Evaluation],
        *,
        default_batch_size: int,
        max_samples: int | None = None,
    ) -> dict[str, Evaluation]:
        """The result in each mode, taken from before a restart where it is there; the model's solver stays as it was.

        `data` names the data set in the log and among what is kept.
        """
        found: dict[str, Evaluation] = {}
        trained_solver = solver_of(self.model)
        for mode in self.modes:
            kept = self.partial.find(data, mode.name)
            if kept is not None:
                log.info("%s %s: taken from before the restart", data, mode.name)
                found[mode.name] = kept
                continue
            if trained_solver is not None:
                self.model.solver = mode.solver(trained_solver)
            limits = [limit for limit in (max_samples, mode.max_samples) if limit is not None]
            num_samples = min([len(dataset), *limits])
            where = f"{data} {mode.name}"
            size = self._batch_size(mode.coupled_batch_size(trained_solver), default_batch_size)
            result = evaluate(EvaluationJob(self.model, dataset, num_samples, size, where, **self.job_options))
            found[mode.name] = Evaluation(mode.record(trained_solver) | result.values, result.predictions_NL)
            self.partial.keep(data, mode.name, found[mode.name])
        if trained_solver is not None:
            self.model.solver = trained_solver
        return found

    def _batch_size(self, fixed: int | None, default: int) -> BatchSize:
        return BatchSize(fixed or int(self.runtime.get("batch_size") or default), is_fixed=fixed is not None)


class PartialResults:
    """A folder of finished results; the values file is written last and says that all is whole.

    `data` names what was evaluated: a data set, with the length where one data set is read at several.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, data: str, mode: str) -> Evaluation | None:
        """What was kept of this pair, None when it was not finished."""
        values, predictions = self._path(data, mode, "json"), self._path(data, mode, "npy")
        if not values.exists():
            return None
        kept = np.load(predictions, allow_pickle=False) if predictions.exists() else None
        return Evaluation(json.loads(values.read_text()), kept)

    def keep(self, data: str, mode: str, result: Evaluation) -> None:
        """Commit a finished pair."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if result.predictions_NL is not None:
            buffer = io.BytesIO()
            np.save(buffer, result.predictions_NL, allow_pickle=False)
            write_atomic(self._path(data, mode, "npy"), buffer.getvalue())
        write_atomic(self._path(data, mode, "json"), json.dumps(result.values, allow_nan=False))

    def discard(self) -> None:
        """Remove the folder: the metrics hold everything that is reported."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, data: str, mode: str, suffix: str) -> Path:
        return self._folder / f"{data.replace('/', '--')}--{mode}.{suffix}"
