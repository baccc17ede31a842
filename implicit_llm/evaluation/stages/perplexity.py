"""The stage `evaluate` of kind `perplexity`: one language model on test sets at several lengths, in every mode."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from implicit_llm.evaluation.answers import Evaluation
from implicit_llm.evaluation.inputs import data_inputs, model_input, reads_of_inputs
from implicit_llm.evaluation.metrics_file import Record, best_of, by_data_and_mode, tracked, write_metrics
from implicit_llm.evaluation.modes import ModeRunner
from implicit_llm.evaluation.partial import PartialResults
from implicit_llm.evaluation.perplexity import evaluate_perplexity, no_perplexity
from implicit_llm.evaluation.perplexity_rows import TextRows
from implicit_llm.evaluation.trained_model import about_model, load_model
from implicit_llm_contracts.config.evaluation import PerplexityConfig, modes_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 32768  # the default batch; another library's model makes 6.6 GB of fp32 logits of it for 50,000 words
TRACKED = ("loss", "perplexity", "perplexity_within_documents", "f_evaluations_per_token", "unconverged_share")


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(PerplexityConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained, test_sets = model_input(context), data_inputs(context)
    model = load_model(trained, context.runtime)
    partial, options = PartialResults(context.work / "partial"), {"precision": config.precision}
    runner = ModeRunner(model, modes, partial, context.runtime, options)
    about = about_model(model, trained)
    records: list[Record] = []
    for role, source in test_sets.items():
        for length in sorted(config.lengths):
            results = _results(runner, role, source, length, config)
            described = {"kind": config.kind, "data": role, "length": length, **about}
            records += [described | {"mode": name} | result.values for name, result in results.items()]
            context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    partial.discard()
    perplexity = by_data_and_mode(records, "perplexity", _label)
    return StageResult([metrics], {"perplexity": perplexity, "best_perplexity": best_of(perplexity, min)})


def _results(
    runner: ModeRunner, role: str, source: Input, length: int, config: PerplexityConfig
) -> Mapping[str, Evaluation]:
    """The result at one length in each mode; without numbers when no row of the test set is so long."""
    rows = TextRows(source.work, length)
    if rows.num_full_rows == 0:
        log.warning(
            "%s: has no row of %d tokens and a next one; perplexity at this length is missing: make the test split "
            "larger, or take the length out of `lengths`",
            role,
            length,
        )
        solver = getattr(runner.model, "solver", None)
        return {mode.name: Evaluation(mode.record(solver) | no_perplexity().values) for mode in runner.modes}
    max_rows = None if config.max_tokens is None else max(1, config.max_tokens // length)
    return runner.results(
        f"{role}-L{length}",
        rows,
        evaluate_perplexity,
        default_batch_size=max(1, BATCH_TOKENS // length),
        max_samples=max_rows,
    )


def _label(record: Record) -> str:
    return f"{record['data']}.L{record['length']}"
