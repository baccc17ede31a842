"""The few things the project asks of MLflow, each of which may be repeated without harm. MLflow's errors pass."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import Point, faults
from implicit_llm_jobs.tracking.mlflow_store import artifact_location, initialise, prepare_environment
from implicit_llm_jobs.tracking.tracked_run import TrackedRun

RUNS_PER_CALL = 50_000  # the most that MLflow searches at once
VALUE_CHARS = 500  # of a param
KEY_CHARS = 250  # of a param or tag
TAG_CHARS = 5000
KEY_TAG = "run_key"
PARENT_TAG = "mlflow.parentRunId"
MODEL_PARAMS = ("model", "phase", "checkpoint")  # of the config: what makes the model
DIGEST_CHARS = 16  # of a fingerprint: as in the names of work directories; MLflow takes 36
_CONTEXT = {"train": "training", "evaluate": "evaluation"}  # what a data set is used for, else its role


class Client:
    """One experiment of an MLflow store. MlflowClient cuts what is logged into calls of the size that MLflow takes."""

    def __init__(self, uri: str, experiment: str) -> None:
        prepare_environment()
        from mlflow import MlflowClient

        initialise(uri)
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment_id = self._find_or_create_experiment(uri, experiment)

    def _find_or_create_experiment(self, uri: str, name: str) -> str:
        """Id of the experiment, which is made, or restored with its runs, if need be."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            faults.point("tracker.before_create_experiment")
            try:
                return self._client.create_experiment(name, artifact_location=artifact_location(uri))
            except MlflowException as error:
                # Another job was faster.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)
                assert found is not None
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def find_run(self, key: str) -> str | None:
        """Id of the run that carries `key`."""
        found = self._client.search_runs([self._experiment_id], f"tags.{KEY_TAG} = '{key}'", max_results=1)
        return found[0].info.run_id if found else None

    def find_or_create_run(self, name: str, key: str, tags: Mapping[str, str], started: str | None) -> str:
        """Id of the run that carries the key, a tag by which it is found again. started: ISO time."""
        found = self.find_run(key)
        if found:
            return found
        faults.point("tracker.before_create_run")
        run = self._client.create_run(
            self._experiment_id,
            start_time=milliseconds(started) if started else None,
            tags={**_tags(tags), KEY_TAG: key},
            run_name=name,
        )
        faults.point("tracker.after_create_run")
        return run.info.run_id

    def statuses(self, tag: str, word: str) -> set[str]:
        """Those of the runs whose `tag` contains the word."""
        query = f"tags.{tag} LIKE '%{word}%'"
        found = self._client.search_runs([self._experiment_id], query, max_results=RUNS_PER_CALL)
        return {run.info.status for run in found}

    def log_config(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Log the config as params, and tags.

        Raises: MlflowException when the run has other params: they are not replaced.
        """
        from mlflow.entities import Param, RunTag

        faults.point("tracker.before_config")
        self._client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in flatten(config).items()],
            tags=[RunTag(key, value) for key, value in _tags(tags).items()],
        )

    def log_points(self, run_id: str, points: Sequence[Point], model_id: str | None = None) -> None:
        """Log points, also as those of a model; equal points that the store already has stay single."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, milliseconds(point.time), point.step, model_id=model_id, run_id=run_id)
            for point in points
            for key, value in point.values.items()
        ]
        faults.point("tracker.before_log")
        self._client.log_batch(run_id, metrics=metrics)
        faults.point("tracker.after_log")

    def log_inputs(self, run_id: str, run: TrackedRun, model_id: str | None = None) -> None:
        """Log the data sets that a run reads, and the model of another run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        inputs = []
        for role, given in run.data_sets().items():
            files = given.manifest.files if given.manifest else ()
            about = {
                "fingerprint": given.fingerprint,
                "role": role,
                "files": len(files),
                "bytes": sum(record.size for record in files),
                **flatten(given.config),
            }
            data_set = Dataset(
                name=given.name,
                digest=given.fingerprint[:DIGEST_CHARS],
                source_type="local",
                source=json.dumps({"uri": run.relative(given.run_dir)}),
                profile=json.dumps(about, sort_keys=True),
            )
            inputs.append(DatasetInput(data_set, [InputTag("mlflow.data.context", _CONTEXT.get(run.stage, role))]))
        models = [LoggedModelInput(model_id)] if model_id and model_id not in self._models(run_id, "inputs") else []
        if inputs or models:
            faults.point("tracker.before_inputs")
            self._client.log_inputs(run_id, datasets=inputs, models=models)

    def find_or_create_model(self, run_id: str, run: TrackedRun) -> str | None:
        """Id of the logged model that the finished run made, None if it made none. Weights are not copied."""
        from mlflow.entities import LoggedModelOutput

        weights = run.weights()
        if weights is None:
            return None
        found = self._client.search_logged_models([self._experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        model = found[0] if found else self._create_model(run_id, run, weights)
        if model.model_id not in self._models(run_id, "outputs"):
            step = run.summary.get("global_step")
            faults.point("tracker.before_outputs")
            self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step if isinstance(step, int) else 0)])
        if model.status != "READY":
            self._client.finalize_logged_model(model.model_id, "READY")
        return model.model_id

    def set_status(self, run_id: str, status: str, time: str | None = None) -> None:
        """RUNNING, SCHEDULED, FINISHED, FAILED or KILLED; `time`: ISO time of the end."""
        faults.point("tracker.before_status")
        if status in ("RUNNING", "SCHEDULED"):
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status=status, end_time=milliseconds(time) if time else None)

    def _create_model(self, run_id: str, run: TrackedRun, weights: tuple[Path, dict[str, str]]) -> Any:
        labels, size = run.labels(), run.summary.get("num_parameters")
        folder, digests = weights
        tags = {
            **labels,
            "config": run.experiment,
            "fingerprint": run.fingerprint,
            "weights": run.relative(folder),
            **{f"sha256.{name}": digest for name, digest in digests.items()},
            **({"num_parameters": str(size)} if size is not None else {}),
        }
        faults.point("tracker.before_create_model")
        return self._client.create_logged_model(
            self._experiment_id,
            name=re.sub(r"[/:.%\"']+", "-", run.name),  # of which MLflow takes none
            source_run_id=run_id,
            tags=_tags(tags),
            params=flatten({key: run.config[key] for key in MODEL_PARAMS if key in run.config}),
            model_type=labels.get("family"),
        )

    def _models(self, run_id: str, side: str) -> set[str]:
        """Ids of the models that a run has as `inputs` or `outputs`."""
        run = self._client.get_run(run_id)
        if side == "inputs":
            return {model.model_id for model in (run.inputs.model_inputs if run.inputs else [])}
        return {model.model_id for model in (run.outputs.model_outputs if run.outputs else [])}


def milliseconds(time: str) -> int:
    """Since 1970, of an ISO time."""
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one with dotted keys; lists and scalars as text of at most 500 characters."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = prefix + re.sub(r"[^\w\-. /:]", "_", str(key))
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            flat[_cut(name, KEY_CHARS)] = _cut(text, VALUE_CHARS)
    return flat


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {_cut(re.sub(r"[^\w\-. /:]", "_", key), KEY_CHARS): _cut(value, TAG_CHARS) for key, value in tags.items()}
