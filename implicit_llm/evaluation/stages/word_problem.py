"""The stage `evaluate` of kind `word_problem`: one trained model on every test set it is given, in every mode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.data.shards import open_dataset
from implicit_llm.evaluation.config import PARALLEL, SEQUENTIAL, EvaluateConfig, ModeConfig, check_modes
from implicit_llm.evaluation.partial import PartialResults
from implicit_llm.evaluation.task import Task, task_of
from implicit_llm.evaluation.word_problem import DEFAULT_BATCH_SIZE, BatchSize, Evaluation, evaluate_word_problem
from implicit_llm.runs.atomic import write_atomic
from implicit_llm.runs.errors import UserError
from implicit_llm.runs.fill import fill
from implicit_llm.runs.stage import Input, StageContext, StageResult

MODEL_ROLE = "model"
METRICS_FILE = "metrics.json"
# Fields of a record that the report reads beside those of `Evaluation.values`; None where unknown.
_SUMMARY_KEYS = ("accuracy_last10", "f_evaluations_per_token")


class EvaluateInputError(UserError):
    """An input directory is not what an evaluation needs."""


@dataclass(frozen=True)
class TestSet:
    """A role of the command line with what lies behind it."""

    role: str
    task: Task
    source: Input


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(EvaluateConfig, context.config, f"evaluate/{context.name}")
    check_modes(config.modes, f"evaluate/{context.name}.modes")
    trained = _input(context, MODEL_ROLE)
    model = _load_model(trained, context.runtime)
    modes = _modes_of(model, config)
    partial = PartialResults(context.work / "partial")
    records: list[dict[str, Any]] = []
    for test_set in _test_sets(context):
        records += _evaluate_data(context, model, modes, test_set, partial, _about_model(model, trained))
        context.journal.metrics(len(records), _tracked(records))
    metrics = context.work / METRICS_FILE
    write_atomic(metrics, json.dumps({"records": records}, sort_keys=True, indent=1, allow_nan=False) + "\n")
    partial.discard()
    return StageResult(files=[metrics], summary=_summary(records))


def _evaluate_data(
    context: StageContext,
    model: Any,
    modes: tuple[ModeConfig, ...],
    test_set: TestSet,
    partial: PartialResults,
    about_model: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The records of one data set, in the order of the modes."""
    dataset = open_dataset(test_set.source.work)
    results: dict[str, Evaluation] = {}
    trained_solver = getattr(model, "solver", None)
    for mode in modes:
        where = f"{test_set.role} {mode.name}"
        found = partial.find(test_set.role, mode.name)
        if found is not None:
            context.log.info("%s: taken from before the restart", where)
            results[mode.name] = found
            continue
        if trained_solver is not None:
            model.solver = mode.solver(trained_solver)
        size = mode.coupled_batch_size
        batch_size = BatchSize(
            size or int(context.runtime.get("batch_size") or DEFAULT_BATCH_SIZE), is_fixed=size is not None
        )
        num_samples = min(len(dataset), mode.max_samples or len(dataset))
        results[mode.name] = evaluate_word_problem(
            model, dataset, num_samples=num_samples, batch_size=batch_size, where=where
        )
        partial.keep(test_set.role, mode.name, results[mode.name])
    if trained_solver is not None:
        model.solver = trained_solver
    sequential = _sequential(modes, results)
    about = {"data": test_set.role, **test_set.task.record(), **about_model}
    return [
        about
        | {"mode": mode.name}
        | results[mode.name].values
        | {"token_match_sequential": results[mode.name].match(sequential)}
        for mode in modes
    ]


def _sequential(modes: tuple[ModeConfig, ...], results: Mapping[str, Evaluation]) -> Evaluation | None:
    """The result in sequential mode, against which the others are compared token by token."""
    return next((results[mode.name] for mode in modes if mode.eval_mode == SEQUENTIAL and mode.name != PARALLEL), None)


def _modes_of(model: Any, config: EvaluateConfig) -> tuple[ModeConfig, ...]:
    if getattr(model, "solver", None) is not None:
        return config.modes
    return (ModeConfig(name=PARALLEL, eval_mode="simultaneous"),)


def _load_model(trained: Input, runtime: Mapping[str, Any]) -> Any:
    """The trained model on its device; safetensors only, nothing is downloaded or unpickled."""
    folder = _model_directory(trained)
    if runtime.get("threads"):
        torch.set_num_threads(int(runtime["threads"]))
    device = runtime.get("device") or "auto"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return model.to(device).eval()


def _model_directory(trained: Input) -> Path:
    for record in trained.manifest.files:
        if re.search(r"(^|/)model/config\.json$", record.path):
            return (trained.dir / record.path).parent
    raise EvaluateInputError(
        f"{trained.dir}/manifest.json: names no model/config.json; "
        f"give the run directory of a training phase as `{MODEL_ROLE}`"
    )


def _about_model(model: Any, trained: Input) -> dict[str, Any]:
    """What the report must know of the model to put a number in its place."""
    config = trained.manifest.identity["config"]
    run_name, _, phase = trained.manifest.name.partition("/")
    seed = config.get("seed")
    learned_from = trained.manifest.summary.get("data") or {}
    return {
        "run": re.sub(r"-s\d+$", "", run_name),
        "phase": phase or None,
        "seed": seed,
        "is_implicit": getattr(model, "solver", None) is not None,
        "num_layers": getattr(model.config, "num_hidden_layers", None),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_length": learned_from.get("length"),
        "train_hard_fraction": learned_from.get("hard_fraction"),
    }


def _test_sets(context: StageContext) -> Iterator[TestSet]:
    """Every input but the model, shortest sequences first."""
    roles = [role for role in context.inputs if role != MODEL_ROLE]
    if not roles:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no test data; add --input NAME=DIR with the run directory of a data set"
        )
    sets = [TestSet(role, task_of(context.inputs[role].manifest), context.inputs[role]) for role in roles]
    yield from sorted(sets, key=lambda item: (item.task.length, item.role))


def _input(context: StageContext, role: str) -> Input:
    if role not in context.inputs:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no input `{role}`; "
            f"add --input {role}=DIR with the run directory of a training phase"
        )
    return context.inputs[role]


def _tracked(records: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics for the journal, one key a (metric, data set, mode); what is missing is left out."""
    return {
        f"{key}.{record['data']}.{record['mode']}": record[key]
        for record in records
        for key in (*_SUMMARY_KEYS, "unconverged_share")
        if record[key] is not None
    }


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Headline of the manifest: last-ten accuracy by data set and mode, and the best of the modes."""
    by_data: dict[str, dict[str, Any]] = {}
    for record in records:
        by_data.setdefault(record["data"], {})[record["mode"]] = record["accuracy_last10"]
    best = {
        data: max((value for value in modes.values() if value is not None), default=None)
        for data, modes in by_data.items()
    }
    return {"accuracy_last10": by_data, "best_accuracy_last10": best}
