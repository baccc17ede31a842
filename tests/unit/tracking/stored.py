"""What an MLflow store shows, without what may differ between two that tell the same: ids, and when they were told."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

ID = "run_key"


class Stored:
    """The runs of the experiment `demo`, by name; names of a test's runs differ."""

    def __init__(self, uri: str | Path) -> None:
        self.client = MlflowClient(tracking_uri=uri if isinstance(uri, str) else f"sqlite:///{uri / 'mlflow.db'}")
        experiment = self.client.get_experiment_by_name("demo")
        self.experiment_ids = [experiment.experiment_id] if experiment else []
        found = self.client.search_runs(self.experiment_ids) if experiment else []
        # A search leaves out the models that a run reads.
        self.runs: dict[str, Run] = {run.info.run_name: self.client.get_run(run.info.run_id) for run in found}
        assert len(self.runs) == len(found), "two runs have one name"
        self._names = {run.info.run_id: run.info.run_name for run in found}

    def history(self, name: str, key: str) -> list[tuple[int, float]]:
        points = self.client.get_metric_history(self.runs[name].info.run_id, key)
        return [(point.step, point.value) for point in points]

    def models(self) -> list[Any]:
        return list(self.client.search_logged_models(self.experiment_ids)) if self.experiment_ids else []

    def content(self) -> dict[str, Any]:
        """All there is to compare."""
        return {name: self._content_of(run) for name, run in self.runs.items()}

    def _content_of(self, run: Run) -> dict[str, Any]:
        upstream = {key: self._names.get(tag) for key, tag in run.data.tags.items() if key.startswith("upstream.")}
        times = (run.info.start_time, run.info.end_time)
        keys = sorted(run.data.metrics)
        models = [model for model in self.models() if model.source_run_id == run.info.run_id]
        return {
            "status": (run.info.status, *times),
            "tags": {key: tag for key, tag in run.data.tags.items() if key not in (ID, *upstream)} | upstream,
            "params": run.data.params,
            "points": {key: self._points(run, key) for key in keys},
            "inputs": sorted(f"{i.dataset.name} {i.dataset.digest}" for i in run.inputs.dataset_inputs),
            "num_given_models": len(run.inputs.model_inputs),
            "num_made_models": len(run.outputs.model_outputs if run.outputs else ()),
            "models": [(m.name, m.tags, m.params, sorted((p.key, p.value) for p in m.metrics)) for m in models],
        }

    def _points(self, run: Run, key: str) -> list[tuple[int, float, int]]:
        points = self.client.get_metric_history(run.info.run_id, key)
        return sorted((point.step, point.value, point.timestamp) for point in points)


def another_database() -> bytes:
    """The content of an SQLite file that is no store."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE mine (x)")
        return connection.serialize()
