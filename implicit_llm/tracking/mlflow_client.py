"""The few things the project asks of MLflow, each of which may be repeated without harm. MLflow's errors pass."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from implicit_llm.testing import faults
from implicit_llm.tracking.journal import Point
from implicit_llm.tracking.mlflow_store import artifact_location, initialise

METRICS_PER_CALL = 1000  # limits of MLflow's log_batch
PARAMS_PER_CALL = 100
VALUE_CHARS = 500  # of a param
KEY_TAG = "run_key"


class Client:
    """One MLflow store."""

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        initialise(uri)
        self._uri = uri
        self._client = MlflowClient(tracking_uri=uri)

    def is_run(self, run_id: str, key: str) -> bool:
        """Whether the store has this run, not deleted, and it carries the key."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return run.info.lifecycle_stage == "active" and run.data.tags.get(KEY_TAG) == key

    def find_or_create_run(self, experiment: str, name: str, key: str, tags: Mapping[str, str]) -> str:
        """Id of the run that carries `key`."""
        experiment_id = self._experiment_id(experiment)
        found = self._client.search_runs([experiment_id], f"tags.{KEY_TAG} = '{key}'", max_results=1)
        if found:
            return found[0].info.run_id
        faults.point("tracker.before_create_run")
        run = self._client.create_run(experiment_id, tags={**tags, KEY_TAG: key}, run_name=name)
        faults.point("tracker.after_create_run")
        return run.info.run_id

    def log_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Log the config as params. Raises: MlflowException when the run has other values: they are not replaced."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten(config).items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            faults.point("tracker.before_config")
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Log points; equal points that the store already has stay single."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, round(datetime.fromisoformat(point.time).timestamp() * 1000), point.step)
            for point in points
            for key, value in point.values.items()
        ]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            faults.point("tracker.before_log")
            self._client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
            faults.point("tracker.after_log")

    def set_status(self, run_id: str, status: str) -> None:
        """RUNNING, SCHEDULED, FINISHED, FAILED or KILLED."""
        faults.point("tracker.before_status")
        if status in ("RUNNING", "SCHEDULED"):
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status=status)

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            faults.point("tracker.before_create_experiment")
            try:
                return self._client.create_experiment(name, artifact_location=artifact_location(self._uri))
            except MlflowException as error:
                # Another job was faster.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)
                assert found is not None
        return found.experiment_id


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one with dotted keys; lists and scalars as text of at most 500 characters."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = prefix + re.sub(r"[^\w\-. /:]", "_", str(key))
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            flat[name] = text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."
    return flat
