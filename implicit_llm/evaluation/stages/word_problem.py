"""The stage `evaluate` of kind `word_problem`: one trained model on every test set it is given, in every mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm.evaluation.answers import Evaluation
from implicit_llm.evaluation.inputs import EvaluateInputError, data_inputs, model_input, reads_of_inputs
from implicit_llm.evaluation.metrics_file import Record, best_of, by_data_and_mode, tracked, write_metrics
from implicit_llm.evaluation.modes import ModeRunner
from implicit_llm.evaluation.partial import PartialResults
from implicit_llm.evaluation.task import Task, task_of
from implicit_llm.evaluation.trained_model import about_model, load_model
from implicit_llm.evaluation.word_problem import default_batch_size, evaluate_word_problem, match
from implicit_llm_contracts.config.evaluation import PARALLEL, SEQUENTIAL, EvaluateConfig, ModeConfig, modes_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_data.shards import open_dataset

__all__ = ["reads_of_inputs", "run"]

TRACKED = ("accuracy_last10", "f_evaluations_per_token", "unconverged_share")


@dataclass(frozen=True)
class TestSet:
    """A role of the command line with what lies behind it."""

    role: str
    task: Task
    source: Input


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(EvaluateConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained = model_input(context)
    test_sets = list(_test_sets(context, config.lengths))
    model = load_model(trained, context.runtime)
    runner = ModeRunner(model, modes, PartialResults(context.work / "partial"), context.runtime, {})
    about = {"kind": config.kind, **about_model(model, trained), **_trained_on(trained)}
    records: list[Record] = []
    for test_set in test_sets:
        records += _evaluate_data(runner, test_set, about)
        context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    runner.partial.discard()
    accuracy = by_data_and_mode(records, "accuracy_last10", _label)
    summary = {"accuracy_last10": accuracy, "best_accuracy_last10": best_of(accuracy, max)}
    return StageResult(files=[metrics], summary=summary)


def _evaluate_data(runner: ModeRunner, test_set: TestSet, about: Mapping[str, Any]) -> list[Record]:
    """The records of one data set, in the order of the modes."""
    dataset = open_dataset(test_set.source.work)
    batch_size = default_batch_size(dataset.length, next(runner.model.parameters()).device.type)
    results = runner.results(test_set.role, dataset, evaluate_word_problem, default_batch_size=batch_size)
    sequential = _sequential(runner.modes, results)
    described = {"data": test_set.role, **test_set.task.record(), **about}
    return [
        described
        | {"mode": mode.name}
        | results[mode.name].values
        | {"token_match_sequential": match(results[mode.name], sequential)}
        for mode in runner.modes
    ]


def _sequential(modes: tuple[ModeConfig, ...], results: Mapping[str, Evaluation]) -> Evaluation | None:
    """The result in sequential mode, against which the others are compared token by token."""
    return next((results[mode.name] for mode in modes if mode.eval_mode == SEQUENTIAL and mode.name != PARALLEL), None)


def _trained_on(trained: Input) -> dict[str, Any]:
    return {"train_hard_fraction": (trained.manifest.summary.get("data") or {}).get("hard_fraction")}


def _test_sets(context: StageContext, lengths: tuple[int, ...] | None) -> Iterator[TestSet]:
    """The test sets of these lengths, shortest sequences first. Raises: EvaluateInputError for a length none has."""
    sets = [TestSet(role, task_of(source.manifest), source) for role, source in data_inputs(context).items()]
    present = sorted({item.task.length for item in sets})
    missing = [length for length in lengths or () if length not in present]
    if missing:
        raise EvaluateInputError(
            f"evaluate/{context.name}.lengths: no test set has sequences of {missing[0]} tokens; there are "
            f"{', '.join(map(str, present))}: add the length to the data's test lengths, or take it out"
        )
    chosen = [item for item in sets if lengths is None or item.task.length in lengths]
    yield from sorted(chosen, key=lambda item: (item.task.length, item.role))


def _label(record: Record) -> str:
    return record["data"]
