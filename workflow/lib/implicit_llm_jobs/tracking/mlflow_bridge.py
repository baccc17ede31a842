"""Write one journal to one MLflow run, starting after the last written line; every step can be repeated safely.

`mlflow.json` in the work directory records the run and how much of the journal was written. Its random `key` is stored
before the run is created and is a tag of the run. After a kill, the next process therefore finds the created run.
Points have the time of their journal line. A batch written twice is therefore equal, and an SQL store keeps equal
points once.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation import PARALLEL
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import read_object, write_json
from implicit_llm_contracts.runs.identity import shortened
from implicit_llm_contracts.runs.journal import JournalTail, Point, point_of
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_contracts.runs.run_directory import JOURNAL, MLFLOW, committed
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_jobs.tracking.mlflow_store import alone, artifact_location, initialise, prepare_environment, quiet
from implicit_llm_jobs.tracking.tracked_run import TrackedRun

log = logging.getLogger(__name__)

LOCK = ".mlflow.lock"  # in a work directory and in the directory of the experiment
KEY_TAG = "run_key"
VALUE_CHARS = 500  # of a param's value
KEY_CHARS = 250  # of the key of a param or tag
TAG_CHARS = 5000
DIGEST_CHARS = 16  # of a fingerprint, as in the names of work directories; MLflow allows 36
MODEL_PARAMS = ("model", "phase", "checkpoint")  # the keys of the config that define the model
# MLflow's charts start a section at each slash of a key. Training metrics have the keys in the table METRICS. Other
# metrics have the journal's keys, after the section of their stage if it has one.
SECTIONS = {"evaluate": "evaluation", "data": "data"}  # evaluation/accuracy.<data set>.<mode>, ...
SUMMARY = "summary"  # one number per run, from its manifest, for tables and parallel coordinates
METRIC_CHARS = 200  # of a metric's key
_REFUSED = re.compile(r"[^\w\-. /:]")  # characters that MLflow refuses
# MLflow's `context` of a data set, by the stage that reads it; for other stages it is the role of the input.
_CONTEXT = {"train": "training", "evaluate": "evaluation"}


@dataclass(frozen=True)
class BridgeState:
    """The content of `mlflow.json`: how much of a run MLflow has.

    lines_written: the number of the journal's lines that MLflow has. status: that of the MLflow run `run_id`. model_id:
    the logged model; None before the end of the run, "" for a run without a model.
    """

    key: str
    run_id: str | None = None
    lines_written: int = 0
    status: str = "RUNNING"
    model_id: str | None = None

    @classmethod
    def read(cls, work: Path) -> BridgeState | None:
        """Return the state in `work`, or None if it is missing or damaged."""
        values = read_object(work / MLFLOW)
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**known) if "key" in known else None


class Bridge:
    """A writer of one run to MLflow, for one thread; a lock makes processes that write the same run take turns."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self._client: Any = None  # MLflow's client, which splits a batch into requests of the size that a store accepts
        self._state = BridgeState("")

    def bring(self) -> None:
        """Write everything that is new in the journal, and the run's status.

        Raises: any exception of MLflow or the file system; the next call resumes after the last finished step.
        """
        with quiet(), alone(self.run.work / LOCK):
            try:
                self._connect()
                self._bring_points()
                if self._status == "FINISHED" and self._state.model_id is None:
                    self._bring_products()
                if self._status != self._state.status:
                    self._bring_status()
            except BaseException:
                self._client = None  # the next call connects again and reads the journal from its first line
                raise

    def _connect(self) -> None:
        state = BridgeState.read(self.run.work)
        if self._client is not None and state == self._state:
            return
        prepare_environment()
        from mlflow import MlflowClient

        initialise(self.run.uri)
        self._client = MlflowClient(tracking_uri=self.run.uri)
        self._experiment_id = self._find_or_create_experiment()
        if state is not None and state.run_id not in (None, self._find_run(state.key)):
            log.info("MLflow does not have the run %s any more; starting another", state.run_id)
            state = None
        self._state = state or BridgeState(secrets.token_hex(16))
        self._save()
        # An existing run gets tags too: it may resume in another invocation, or lack a tag that was introduced later.
        tags = self._tags()
        if self._state.run_id is None:
            started = self.run.times()[0]
            self._save(run_id=self._find_or_create_run(tags, started))
        self._log_config(self.run.config, tags)
        self._bring_inputs()
        self._trajectory, self._journal = Trajectory(), JournalTail(self.run.journal)
        self._status = "RUNNING"

    def _find_or_create_experiment(self) -> str:
        """Return the experiment's id; create it, or restore it with its runs, if necessary."""
        name = self.run.experiment
        with alone(self.run.config_dir / LOCK):  # jobs that start at the same time would each create one
            found = self._client.get_experiment_by_name(name)
            if found is None:
                faults.point("tracker.before_create_experiment")
                return str(self._client.create_experiment(name, artifact_location=artifact_location(self.run.uri)))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _find_run(self, key: str) -> str | None:
        """Return the id of the run with this key, or None."""
        found = self._client.search_runs([self._experiment_id], f"tags.{KEY_TAG} = '{key}'", max_results=1)
        return found[0].info.run_id if found else None

    def _find_or_create_run(self, tags: Mapping[str, str], started: str | None) -> str:
        """Return the id of the run whose tag is the stored key; create it if necessary. started: ISO time."""
        if found := self._find_run(self._state.key):
            return found
        faults.point("tracker.before_create_run")
        run = self._client.create_run(
            self._experiment_id,
            start_time=milliseconds(started) if started else None,
            tags={**_short(tags), KEY_TAG: self._state.key},
            run_name=self.run.title,
        )
        faults.point("tracker.after_create_run")
        return str(run.info.run_id)

    def _log_config(self, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Log the config as params, and the tags.

        Raises: MlflowException if the run has different params, which are not replaced.
        """
        from mlflow.entities import Param, RunTag

        faults.point("tracker.before_config")
        params = starmap(Param, flatten(config).items())
        self._client.log_batch(self._run_id, params=[*params], tags=[*starmap(RunTag, _short(tags).items())])

    def _bring_inputs(self) -> None:
        """Log the run's inputs: data sets, and the logged model that it reads."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        run, inputs = self.run, []
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
        run_id, model_id = self._run_id, self._given_model()
        known = self._client.get_run(run_id).inputs
        is_known = model_id in {model.model_id for model in (known.model_inputs if known else ())}
        models = [LoggedModelInput(model_id)] if model_id and not is_known else []
        if inputs or models:
            faults.point("tracker.before_inputs")
            self._client.log_inputs(run_id, datasets=inputs, models=models)

    def _bring_points(self) -> None:
        new = self._state.lines_written - self._journal.lines
        records = self._journal.new_records()
        self._status = self.run.status(records) or self._status
        taken = [self._trajectory.take(record) for record in records]
        points = [point for point in taken[max(0, new) :] if point is not None]
        if points:
            self._log_points(points, self._given_model())
        if self._journal.lines > self._state.lines_written:
            self._save(lines_written=self._journal.lines)

    def _log_points(self, points: Sequence[Point], model_id: str | None) -> None:
        """Log points for the run and, with `model_id`, for that model; the store keeps equal points once."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, milliseconds(point.time), point.step, model_id=model_id, run_id=self._run_id)
            for point in map(self._named, points)
            for key, value in point.values.items()
        ]
        faults.point("tracker.before_log")
        self._client.log_batch(self._run_id, metrics=metrics)
        faults.point("tracker.after_log")

    def _bring_products(self) -> None:
        """Log a finished run's model, its summary metrics and the tags that depend on the result."""
        self._log_config({}, self._tags())
        model_id, summary = self._find_or_create_model(), self._trajectory.summary
        if summary is not None and summary.values:
            self._log_points([summary], model_id or self._given_model())
        self._save(model_id=model_id or "")

    def _find_or_create_model(self) -> str | None:
        """Return the id of the finished run's logged model, or None without a model. Weights are not copied."""
        from mlflow.entities import LoggedModelOutput

        if (weights := self.run.weights()) is None:
            return None
        run_id = self._run_id
        found = self._client.search_logged_models([self._experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        model = found[0] if found else self._create_model(run_id, *weights)
        known = self._client.get_run(run_id).outputs
        if model.model_id not in {output.model_id for output in (known.model_outputs if known else ())}:
            step = self.run.summary.get("global_step")
            faults.point("tracker.before_outputs")
            self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step if isinstance(step, int) else 0)])
        if model.status != "READY":
            self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _create_model(self, run_id: str, folder: Path, digests: Mapping[str, str]) -> Any:
        run = self.run
        labels, size = run.labels(), run.summary.get("num_parameters")
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
            name=re.sub(r"[/:.%\"']+", "-", run.name),  # MLflow refuses these characters
            source_run_id=run_id,
            tags=_short(tags),
            params=flatten({key: run.config[key] for key in MODEL_PARAMS if key in run.config}),
            model_type=labels.get("family"),
        )

    def _bring_status(self) -> None:
        """Set the status of the run: RUNNING, SCHEDULED, FINISHED, FAILED or KILLED."""
        faults.point("tracker.before_status")
        if self._status in ("RUNNING", "SCHEDULED"):
            self._client.update_run(self._run_id, status=self._status)
        else:
            ended = self.run.times()[1]
            self._client.set_terminated(self._run_id, self._status, milliseconds(ended) if ended else None)
        self._save(status=self._status)

    def _named(self, point: Point) -> Point:
        stage, values = self.run.stage, point.values
        values = in_one_column(values, self.run.config) if stage == "evaluate" else values
        return replace(point, values={mlflow_key(stage, key): value for key, value in values.items()})

    def _tags(self) -> dict[str, str]:
        states = {role: BridgeState.read(work) for role, work in self.run.inputs.items()}
        return self.run.tags({role: state.run_id for role, state in states.items() if state and state.run_id})

    def _given_model(self) -> str | None:
        """Return the id of the logged model that the run reads, or None."""
        work = self.run.inputs.get(MODEL_ROLE)
        return read_object(work / MLFLOW).get("model_id") or None if work else None

    @property
    def _run_id(self) -> str:
        assert self._state.run_id is not None
        return self._state.run_id

    def _save(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        write_json(self.run.work / MLFLOW, self._state)


def is_complete(work: Path) -> bool:
    """Return whether MLflow has the whole journal of an ended run and its status; True without a journal.

    This depends on the files in `work` alone; the store is not read.
    """
    try:
        lines = (work / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return True
    state = BridgeState.read(work)
    if state is None or state.lines_written < lines:
        return False
    return state.status == "FINISHED" if committed(work) is not None else state.status != "RUNNING"


def milliseconds(time: str) -> int:
    """Return the milliseconds from 1970 to an ISO time."""
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted keys; lists and scalars become text of at most 500 characters."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = prefix + _REFUSED.sub("_", str(key))
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            flat[shortened(name, KEY_CHARS)] = shortened(text, VALUE_CHARS)
    return flat


def _short(tags: Mapping[str, str]) -> dict[str, str]:
    names = {_REFUSED.sub("_", key): value for key, value in tags.items()}
    return {shortened(name, KEY_CHARS): shortened(value, TAG_CHARS) for name, value in names.items()}


def mlflow_key(stage: str, key: str) -> str:
    """Return MLflow's key for the journal's `key`; if `key` already has a section, the section stays."""
    key = _REFUSED.sub("-", key.replace("@", "."))[:METRIC_CHARS]
    if stage == "train" and key in METRICS:
        return METRICS[key].mlflow_key
    return f"{SECTIONS[stage]}/{key}" if stage in SECTIONS and "/" not in key else key


def in_one_column(values: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """Return an evaluation's numbers, those of the main mode also under keys that do not name the mode.

    The main mode is an explicit model's only mode, or an implicit model's first one, unless its modes are swept. With
    these keys, MLflow compares explicit and implicit models in one column.
    """
    modes = () if config.get("sweep") else config.get("modes") or ()
    main = (PARALLEL, *(mode["name"] for mode in modes[:1]))
    ends = ["." + re.sub(r"[^\w.-]", "-", name) for name in main]  # the ends of the keys of an evaluation's metrics
    shared = {key.removesuffix(end): value for key, value in values.items() for end in ends if key.endswith(end)}
    return {**values, **shared}


class Trajectory:
    """A filter that returns the new metrics of each record of a journal; it must get all records from the first on.

    MLflow keeps every point and cannot delete one. After a rewind, steps are repeated; MLflow has their points already,
    so the new ones are left out. Both are equal for an equal number of processes, because the resumed run is then
    bitwise equal. Otherwise they differ; MLflow keeps the first points, and the journal has both.
    """

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}
        self.summary: Point | None = None  # that of the last `stage_finished`; an earlier one was not committed

    def take(self, record: Mapping[str, Any]) -> Point | None:
        """Return the new metrics of a record, or None if it has none; the summary is no part of them."""
        if record.get("name") == "stage_finished":
            numbers = _summary_numbers(record.get("summary") or {})
            self.summary = Point(0, record["time"], {f"{SUMMARY}/{key}": value for key, value in numbers.items()})
        if record["kind"] != "metrics":
            return None
        point = point_of(record)
        known = self._known.setdefault(point.step, set())
        new = replace(point, values={key: value for key, value in point.values.items() if key not in known})
        known.update(new.values)
        return new if new.values else None


def _summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in the summary, in its `metrics`, and in each mapping `best_*`, whose name is a prefix."""
    found = {key: value for key, value in summary.items() if _is_number(value)}
    for key, values in summary.items():
        if isinstance(values, Mapping) and (key == "metrics" or key.startswith("best_")):
            prefix = "" if key == "metrics" else f"{key}."
            found |= {f"{prefix}{name}": value for name, value in values.items() if _is_number(value)}
    return {key: float(value) for key, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
