"""What a run reads and makes, as MLflow shows it: data sets as inputs, the trained model as a logged model."""

from __future__ import annotations

from implicit_llm_jobs.tracking.mlflow_client import DataSet, NewModel, flatten
from implicit_llm_jobs.tracking.tracked_run import TrackedRun, weights_of

_CONTEXT = {"train": "training", "evaluate": "evaluation"}
MODEL_PARAMS = ("model", "phase", "checkpoint")  # of the config: what makes the model


def data_sets_of(run: TrackedRun) -> list[DataSet]:
    """The data sets that the run reads."""
    found = []
    for role, given in run.data_sets().items():
        manifest = given.manifest
        assert manifest is not None
        about = {
            "role": role,
            "files": len(manifest.files),
            "bytes": sum(record.size for record in manifest.files),
            **flatten(manifest.identity.get("config", {})),
        }
        source = run.relative(given.run_dir)
        found.append(DataSet(manifest.name, given.fingerprint, source, _CONTEXT.get(run.stage, role), about))
    return found


def model_of(run: TrackedRun) -> NewModel | None:
    """The model that the finished run made; its weights are neither copied nor read."""
    manifest = run.manifest
    weights = None if manifest is None else weights_of(run.run_dir, manifest)
    if manifest is None or weights is None:
        return None
    labels = run.labels()
    size = manifest.summary.get("num_parameters")
    tags = {
        **labels,
        "config": run.experiment,
        "fingerprint": run.fingerprint,
        "weights": run.relative(weights.folder),
        **{f"sha256.{name}": digest for name, digest in weights.sha256.items()},
        **({"num_parameters": str(size)} if size is not None else {}),
    }
    params = flatten({key: run.config[key] for key in MODEL_PARAMS if key in run.config})
    step = manifest.summary.get("global_step")
    return NewModel(run.name, labels.get("family"), tags, params, step if isinstance(step, int) else 0)
