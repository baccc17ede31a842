"""Provide the common parts of all evaluations: load the model, evaluate it in each mode, and write metrics.json."""

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.device import set_up_torch
from implicit_llm.evaluation.answers import EvaluationBatchSize, EvaluationJob, EvaluationResult
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading import import_package_of, load_foreign
from implicit_llm_contracts.config.evaluation import PARALLEL, EvaluateConfigError, ModeConfig, modes_of, swept_modes
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_atomic, write_json
from implicit_llm_contracts.runs.identity import run_and_phase
from implicit_llm_contracts.runs.run_directory import METRICS
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE, Input, StageContext, StageResult
from implicit_llm_data.shard_writer import write_array
from implicit_llm_data.shards import Sequences

log = logging.getLogger(__name__)

Record = dict[str, Any]
Place = Callable[[Record], tuple[str, str]]


class ModelEvaluation:
    """An evaluation of one trained model in each of its modes, with the records of metrics.json so far.

    modes: an explicit model has only the mode "parallel". place: returns data set and mode of a record, as the journal
    and the headline name them. tracked: the fields of a record that the journal gets, besides those in the
    record's field `metrics`.
    Runtime options: batch_size (sequences), and those of `load_model`.
    Raises: EvaluateConfigError for wrong modes, and the errors of `load_model`.
    """

    def __init__(
        self, context: StageContext, config: Any, tracked: Sequence[str], place: Place = itemgetter("data", "mode")
    ) -> None:
        trained = context.given(MODEL_ROLE)
        self.model = load_model(trained, context.runtime)
        self.solver = solver_of(self.model)
        if self.solver is None:
            sweep = next((mode.sweep for mode in swept_modes(config.modes, config.sweep)), None)
            self.modes: tuple[ModeConfig, ...] = (ModeConfig(name=PARALLEL, eval_mode="simultaneous", sweep=sweep),)
        else:
            self.modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
        self.about = {"kind": config.kind, **about_model(self.model, trained)}
        self.precision: Any = getattr(config, "precision", "fp32")
        self.batch_size = int(context.runtime.get("batch_size") or 0) or None
        self._partial = context.work / "partial"  # finished results, for a restart
        self.records: list[Record] = []
        self.place = place
        self._context, self._tracked = context, tracked

    def in_each_mode(
        self,
        data: str,
        dataset: Sequences,
        evaluate: Callable[[EvaluationJob], EvaluationResult],
        *,
        batch_size: int,
        max_samples: int | None = None,
    ) -> dict[str, EvaluationResult]:
        """Return the results by mode: evaluate and store each, unless it was already stored before a restart.

        The call changes the solver of the model, and restores it unless an error is raised.
        data: the name of the data set in the log and in stored results.
        evaluate: computes the result of a job. The other arguments are those of `job`.
        """
        found = {}
        for mode in self.modes:
            result, where = self.kept(data, mode.name), f"{data} {mode.name}"
            if result is None:
                if self.solver is not None:
                    self.model.solver = mode.solver(self.solver)
                job = self.job(where, dataset, [mode], batch_size=batch_size, max_samples=max_samples)
                job.kept = self._path(data, mode.name, "pieces")
                result = evaluate(job)
                result.values = mode.record(self.solver) | result.values
                self.keep(data, mode.name, result)
            else:
                log.info("%s: taken from before the restart", where)
            found[mode.name] = result
        if self.solver is not None:
            self.model.solver = self.solver
        return found

    def job(
        self,
        where: str,
        dataset: Sequences,
        modes: Sequence[ModeConfig],
        *,
        batch_size: int,
        max_samples: int | None = None,
    ) -> EvaluationJob:
        """Return the job that evaluates all of `modes` on the same first sequences of `dataset`.

        batch_size: the default; the runtime's batch size replaces it, and `coupled_batch_size` of an implicit
        model's modes replaces both. max_samples: the most sequences; a mode's own `max_samples` may lower this limit.
        Raises: EvaluateConfigError if modes need different batch sizes.
        """
        solver = self.solver  # the results of an explicit model never depend on the batch
        coupled = {} if solver is None else {mode.name: mode.coupled_batch_size(solver) for mode in modes}
        sizes = {name: size for name, size in coupled.items() if size is not None}
        fixed = set(sizes.values())
        if len(fixed) > 1:
            raise EvaluateConfigError(
                f"modes: all are compared on the same batches, and the batch sizes differ ({sizes}); "
                "give them the same batch_size"
            )
        size = EvaluationBatchSize(next(iter(fixed), None) or self.batch_size or batch_size, is_fixed=bool(fixed))
        limits = [limit for limit in (max_samples, *(mode.max_samples for mode in modes)) if limit is not None]
        return EvaluationJob(self.model, dataset, min([len(dataset), *limits]), size, where, self.precision)

    def kept(self, data: str, mode: str) -> EvaluationResult | None:
        """Return the stored result on the data set `data` in a mode, or None if there is no finished one."""
        values = self._path(data, mode, "json")
        if not values.exists():
            return None
        predictions = self._path(data, mode, "npy")
        predictions_NL = np.load(predictions, allow_pickle=False) if predictions.exists() else None
        return EvaluationResult(json.loads(values.read_text()), predictions_NL)

    def keep(self, data: str, mode: str, result: EvaluationResult) -> None:
        """Store a finished result for a restart and delete its pieces; its values are written last and complete it."""
        if result.predictions_NL is not None:
            write_array(self._path(data, mode, "npy"), result.predictions_NL)
        write_json(self._path(data, mode, "json"), result.values)
        shutil.rmtree(self._path(data, mode, "pieces"), ignore_errors=True)

    def _path(self, data: str, mode: str, suffix: str) -> Path:
        return self._partial / f"{data.replace('/', '--')}--{mode}.{suffix}"

    def add(self, described: Record, results: Mapping[str, EvaluationResult]) -> None:
        """Add one record for each mode; `described` has the fields that all of them share."""
        self.add_records([described | {"mode": mode} | result.values for mode, result in results.items()])

    def add_records(self, records: Iterable[Record]) -> None:
        """Add records with the model's description, and write all tracked metrics to the journal."""
        self.records += [self.about | record for record in records]
        values = {
            tracked_name(key, *self.place(record)): value
            for record in self.records
            for key, value in ({key: record.get(key) for key in self._tracked} | record.get("metrics", {})).items()
            if value is not None
        }
        self._context.journal.metrics(len(self.records), values)

    def headline(self, key: str, best: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Return {`key`: the values of this field in the records, by data set and mode}.

        With `best` (max or min), the result also has `best_<key>`: by data set, the best value, or None without any.
        """
        by_data: dict[str, dict[str, Any]] = {}
        for record in self.records:
            data, mode = self.place(record)
            by_data.setdefault(data, {})[mode] = record[key]
        if best is None:
            return {key: by_data}
        known = {data: [value for value in modes.values() if value is not None] for data, modes in by_data.items()}
        return {key: by_data, f"best_{key}": {data: best(values, default=None) for data, values in known.items()}}

    def finish(self, summary: dict[str, Any]) -> StageResult:
        """Write metrics.json, from which the report reads all scores, and delete the results stored for a restart."""
        path = write_metrics(self._context.work, self.records)
        shutil.rmtree(self._partial, ignore_errors=True)
        return StageResult([path], summary)


def rows_of(tokens: int | None, length: int) -> int:
    """Return how many whole sequences of `length` tokens fit into `tokens`, at least one; None means no limit."""
    return sys.maxsize if tokens is None else max(1, tokens // length)


def write_metrics(work: Path, records: Sequence[Record]) -> Path:
    """Write metrics.json below `work`; equal records give equal bytes."""
    path = work / METRICS
    write_atomic(path, json.dumps({"records": records}, sort_keys=True, indent=1, allow_nan=False) + "\n")
    return path


def tracked_name(*parts: str) -> str:
    """Join parts to a name that MLflow allows; the mode "blockwise@eval_tol=0.2" becomes "blockwise.eval_tol-0.2"."""
    return re.sub(r"[^\w.-]", "-", ".".join(parts).replace("@", "."))


class EvaluateInputError(UserError):
    """The model or the test data are missing, or do not have what the evaluation needs."""


def data_inputs(context: StageContext) -> dict[str, Input]:
    """Return all inputs except the model, by role. Raises: EvaluateInputError if there are none."""
    found = {role: context.inputs[role] for role in sorted(context.inputs) if role != MODEL_ROLE}
    if not found:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no test data; add the run directory of a data set to `inputs` of the identity"
        )
    return found


CHECKPOINT = "checkpoint"  # the stage that imports models


def load_model(trained: Input, runtime: Mapping[str, Any]) -> Any:
    """Return the trained model on the chosen device, in fp32 and evaluation mode; download and unpickle nothing.

    Runtime options: device (auto, cpu, cuda), threads, kernels (a KernelChoice).
    Raises: EvaluateInputError, NoGpu, KernelsUnavailable.
    """
    folder = model_directory(trained)
    device = set_up_torch(
        runtime.get("device") or "auto", runtime.get("kernels") or "auto", runtime.get("threads") or None
    )
    try:
        import_package_of(trained.manifest.config.get("model") or {})
        model: Any = load_foreign(folder)
    except ModelConfigError as error:
        raise EvaluateInputError(f"{folder}: {error}") from error
    return model.to(device).eval()


def model_directory(trained: Input) -> Path:
    """Return the folder `model` of a training phase or an imported checkpoint.

    Raises: EvaluateInputError if the manifest of `trained` names no model.
    """
    folder = trained.manifest.model_folder
    if folder is not None:
        return trained.dir / folder
    raise EvaluateInputError(
        f"{trained.dir}/manifest.json: names no model/config.json; "
        f"give the run directory of a training phase or a checkpoint as `{MODEL_ROLE}`"
    )


def about_model(model: Any, trained: Input) -> dict[str, Any]:
    """Return the fields of a record that describe the model; unknown values are None.

    A model that was trained elsewhere has no seed and the phase "checkpoint"; `source` names its origin.
    """
    summary = trained.manifest.summary
    run, phase = run_and_phase(trained.manifest.name, trained.manifest.config)
    is_peer = trained.manifest.stage == CHECKPOINT
    learned_from = summary.get("data") or {}
    return {
        "run": run,
        "phase": CHECKPOINT if is_peer else phase,
        "source": summary.get("source") if is_peer else None,
        "seed": trained.manifest.config.get("seed"),
        "is_implicit": solver_of(model) is not None,
        "model_type": getattr(model.config, "model_type", None),
        "num_layers": getattr(model.config, "num_hidden_layers", None),
        "num_parameters": model.num_parameters(),
        "train_length": learned_from.get("length"),
        "train_tokens": summary.get("tokens"),
        "train_flops": summary.get("flops"),
    }
