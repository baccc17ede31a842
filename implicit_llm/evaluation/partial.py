"""Finished (data set, mode) pairs of an evaluation, so that a restarted job goes on after them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np

from implicit_llm.evaluation.answers import Evaluation
from implicit_llm_contracts.runs.atomic import write_atomic


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
