"""A task, a kind of evaluation and a figure: parity, the sum of all bits so far modulo 2."""

import numpy as np

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetSpec, open_dataset

PLUGIN = {
    "tasks": {
        "parity": {
            "labels": "aligned",
            "accuracy": ["accuracy_last10", 10],
            "learns": "parity: the answer at each position is the sum of all bits so far, modulo 2",
            "limits": "It knows two tokens.",
            "settings": {"length": 8, "num_samples": 1024},
        }
    },
    "evaluations": {
        "parity_accuracy": {"data": ["parity"], "settings": {"batch_size": 256}, "metrics": ["accuracy_token"]}
    },
    "figures": {
        "parity-by-length": {
            "caption": "Accuracy on parity by the number of bits.",
            "needs": {"kind": "parity_accuracy"},
        }
    },
}


def make_parity(context: StageContext) -> StageResult:
    """The body of a job that makes a data set."""
    settings = context.config
    stream = np.random.default_rng([settings["seed"], settings["split"] == "test"])
    bits_NL = stream.integers(0, 2, (settings["num_samples"], settings["length"]), dtype=np.uint8)
    labels_NL = (bits_NL.cumsum(axis=1) % 2).astype(np.uint8)
    spec = DatasetSpec(2, settings["length"], ("input_ids", "labels"), dict(settings))
    files = write_shards(context, spec, 1, lambda shard: {"input_ids": bits_NL, "labels": labels_NL})
    return StageResult(files, {"num_tokens": bits_NL.size, "length": settings["length"], "vocab_size": 2})


def evaluate_parity_accuracy(context: StageContext) -> StageResult:
    """The body of a job that evaluates a model on all test sets, in each mode."""
    from implicit_llm.evaluation.frame import ModelEvaluation, data_inputs
    from implicit_llm.evaluation.kinds.word_problem import evaluate_word_problem

    config = fill(context.kinds.evaluations["parity_accuracy"].config, context.config, context.name)
    evaluation = ModelEvaluation(context, config, tracked=("accuracy_token",))
    for role, source in data_inputs(context).items():
        dataset = open_dataset(source.work)
        results = evaluation.in_each_mode(role, dataset, evaluate_word_problem, batch_size=config.batch_size)
        evaluation.add({"data": role, "length": dataset.length}, results)
    return evaluation.finish(evaluation.headline("accuracy_token", max))


def draw_parity_by_length(given):  # type: ignore[no-untyped-def]
    """The figure: panels drawn with matplotlib, from the table of all results, which has a row for each number."""
    from implicit_llm_report.figures.svg import Figure, Panel

    frame = given.measured
    rows = frame[(frame["kind"] == "parity_accuracy") & (frame["metric"] == "accuracy_token")]

    def draw(axes) -> None:  # type: ignore[no-untyped-def]
        for name, points in rows.groupby("name"):
            axes.plot(points["length"], points["value"], "o-", label=name)
        axes.set(xlabel="bits", ylabel="accuracy")
        axes.legend()

    return Figure("parity-by-length", "Parity", (Panel("Parity", draw),), legend=(), roles=tuple(rows["role"].unique()))
