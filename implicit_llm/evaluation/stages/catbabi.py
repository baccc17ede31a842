"""The stage `evaluate` of kind `catbabi`: questions answered and words predicted by one model, in every mode."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial as bind
from typing import Any

from implicit_llm.evaluation.answers import Evaluation
from implicit_llm.evaluation.catbabi import QUESTION_MARK, WINDOWED, evaluate_catbabi, no_answers
from implicit_llm.evaluation.catbabi_carried import StoriesInOrder, carries_state, evaluate_carried
from implicit_llm.evaluation.inputs import EvaluateInputError, data_inputs, model_input, reads_of_inputs
from implicit_llm.evaluation.metrics_file import Record, best_of, by_data_and_mode, tracked, write_metrics
from implicit_llm.evaluation.modes import ModeRunner
from implicit_llm.evaluation.partial import PartialResults
from implicit_llm.evaluation.trained_model import about_model, load_model
from implicit_llm_contracts.config.evaluation import CatbabiConfig, modes_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import open_dataset

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 16384
TRACKED = ("accuracy", "lm_accuracy", "lm_perplexity", "f_evaluations_per_token", "unconverged_share")
VOCABULARY_FILE = "vocabulary.json"  # beside the rows


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(CatbabiConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained = model_input(context)
    datasets = {role: open_dataset(source.work) for role, source in data_inputs(context).items()}
    questions = {role: question_id(dataset) for role, dataset in datasets.items()}
    model = load_model(trained, context.runtime)
    partial = PartialResults(context.work / "partial")
    runner = ModeRunner(model, modes, partial, context.runtime, {})
    about = about_model(model, trained)
    records: list[Record] = []
    for role, dataset in datasets.items():
        for protocol in config.protocols:
            results = _results(runner, role, dataset, questions[role], (protocol, config.carried_max_tokens))
            described = {"kind": config.kind, "protocol": protocol, "data": role, "length": dataset.length, **about}
            records += [described | {"mode": name} | result.values for name, result in results.items()]
            context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    partial.discard()
    accuracy = by_data_and_mode(records, "accuracy", _label)
    return StageResult([metrics], {"accuracy": accuracy, "best_accuracy": best_of(accuracy, max)})


def _results(
    runner: ModeRunner, role: str, dataset: Any, question: int, how: tuple[str, int | None]
) -> Mapping[str, Evaluation]:
    """The result of a protocol in each mode, `how` being its name and carried_max_tokens.

    Without numbers where the protocol is "carried" and the model has no state to carry.
    """
    protocol, max_tokens = how
    if protocol == WINDOWED:
        evaluate, size = bind(evaluate_catbabi, question_id=question), max(1, BATCH_TOKENS // dataset.length)
        return runner.results(role, dataset, evaluate, default_batch_size=size)
    if not carries_state(runner.model):
        log.warning(
            "%s: %s has no state of fixed size that could be carried from window to window; the protocol carried is "
            "missing: use a Mamba2 model, or take carried out of `protocols`",
            role,
            getattr(runner.model.config, "model_type", "the model"),
        )
        solver = getattr(runner.model, "solver", None)
        return {mode.name: Evaluation(mode.record(solver) | no_answers().values) for mode in runner.modes}
    stories = StoriesInOrder(dataset.directory, dataset.length, dataset.vocab_size)
    max_windows = None if max_tokens is None else max(1, max_tokens // dataset.length)
    evaluate = bind(evaluate_carried, question_id=question)
    return runner.results(f"{role}.{protocol}", stories, evaluate, default_batch_size=1, max_samples=max_windows)


def question_id(dataset: Any) -> int:
    """The token of "?" by the vocabulary beside the rows. Raises: EvaluateInputError when there is none."""
    path = dataset.directory / VOCABULARY_FILE
    words = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    if QUESTION_MARK not in words:
        raise EvaluateInputError(
            f"{path}: is missing or has no {QUESTION_MARK!r}, so there are no questions; "
            "give the run directory of a catbabi data set"
        )
    return words.index(QUESTION_MARK)


def _label(record: Record) -> str:
    return record["data"] if record["protocol"] == WINDOWED else f"{record['data']}.{record['protocol']}"
