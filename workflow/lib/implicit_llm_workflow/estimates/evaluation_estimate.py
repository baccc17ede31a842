"""What the evaluations of an experiment take: a forward pass over the test sets for each mode.

How many f-evaluations a token takes there is assumed: `max_iter` of the solver. Sequential modes wait
for launches and not for FLOPs, so they have no price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import LM_EVAL
from implicit_llm_contracts.config.flops import forward_flops, num_parameters
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_workflow.estimates.hardware import Hardware
from implicit_llm_workflow.estimates.throughput import Price, Throughput, TrainingWork, variant_of
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.prefetching.needs import read_evaluation_data

SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class EvaluationEstimate:
    """One evaluation job. tokens: over all test sets and modes but sequential ones; None where text decides.

    prices: GPU-hours by card, without sequential modes, `has_sequential` says whether there are any.
    """

    key: str
    evaluation: str
    tokens: float | None
    flops: float | None
    prices: Mapping[str, Price | None]
    has_sequential: bool


@dataclass(frozen=True)
class _TestSet:
    """What one pass over a test set reads: `tokens`, `length` in a row; `rows` None where text decides."""

    length: int
    tokens: float
    rows: int | None = None

    def tokens_in(self, mode: Mapping[str, Any]) -> float:
        """Tokens of a mode, which may read the first rows only."""
        limit = mode.get("max_samples")
        return self.tokens if limit is None or self.rows is None else self.tokens * min(1.0, limit / self.rows)


def evaluation_estimates(plan: Plan, hardware: Hardware) -> list[EvaluationEstimate]:
    """In the order of the plan."""
    throughput = Throughput(hardware)
    return [_estimate(plan, node, hardware, throughput) for node in plan.nodes.values() if node.stage == "evaluate"]


def _estimate(plan: Plan, node: Node, hardware: Hardware, throughput: Throughput) -> EvaluationEstimate:
    trained, name = plan.nodes[node.upstream["model"]].config, node.name.rpartition("/")[2]
    if "phase" not in trained:  # a peer, whose sizes are in its checkpoint
        return EvaluationEstimate(node.key, name, None, None, dict.fromkeys(hardware.cards), False)
    solver, precision = trained["phase"]["solver"], node.config.get("precision", trained["precision"])
    configured = node.config.get("modes", ())
    has_sequential = solver is not None and any(mode["eval_mode"] == SEQUENTIAL for mode in configured)
    modes = [mode for mode in configured if mode["eval_mode"] != SEQUENTIAL]
    test_sets = (
        _downstream_requests(node.config)
        if node.config["kind"] == LM_EVAL
        else _test_sets(
            plan, [plan.nodes[key] for role, key in node.upstream.items() if role != "model"], node, hardware
        )
    )
    unknown = EvaluationEstimate(node.key, name, None, None, dict.fromkeys(hardware.cards), has_sequential)
    if not configured or test_sets is None:
        return unknown
    # An explicit model gives the same in every mode and is run once, over all rows.
    swept = sum(len(values) for values in node.config.get("sweep", {}).values()) or 1
    read_in = modes * swept if solver is not None else [{}]
    lengths = [(test_set.length, sum(map(test_set.tokens_in, read_in))) for test_set in test_sets]
    try:
        flops = sum(_forward_flops(trained["model"], solver, length) * tokens for length, tokens in lengths)
        parameters = num_parameters(trained["model"])
    except ValueError:  # a model whose operations are not known here
        return unknown
    work = TrainingWork(trained["model"]["model_type"], variant_of(solver), parameters, precision, flops, flops)
    prices = {card: throughput.price(work, card) for card in hardware.cards}
    return EvaluationEstimate(node.key, name, sum(tokens for _, tokens in lengths), flops, prices, has_sequential)


def _forward_flops(model: Mapping[str, Any], solver: Mapping[str, Any] | None, length: int) -> float:
    forward = forward_flops(model, length)
    evaluations = 1 if solver is None else SolverConfig.of(solver).max_iter  # also of a model trained unrolled
    return evaluations * forward.stack + forward.outside


def _downstream_requests(evaluation: Mapping[str, Any]) -> list[_TestSet] | None:
    """The harness's requests, by their mean length; None where the size of a task is not known."""
    known, requests = read_evaluation_data()["tasks"], list[_TestSet]()
    for task in evaluation["tasks"]:
        size = known.get(task, {})
        if "documents" not in size:
            return None
        documents = min(size["documents"], evaluation.get("limit") or size["documents"])
        length = size["request_tokens"]
        requests.append(_TestSet(length, documents * size["requests"] * length))
    return requests


def _test_sets(plan: Plan, data: list[Node], evaluation: Node, hardware: Hardware) -> list[_TestSet] | None:
    """The test sets at each length at which they are read; None where that follows from text."""
    config, found = evaluation.config, list[_TestSet]()
    for node in data:
        kind = node.config["kind"]
        if kind == "word_problem":
            length, rows = node.config["length"], node.config["num_samples"]
            if length in (config.get("lengths") or [length]):
                found.append(_TestSet(length, rows * length, rows))
            continue
        if kind != "token_stream" or "lengths" not in config:
            return None
        shard = plan.nodes[next(iter(node.upstream.values()))].config
        corpus = hardware.corpora.get(shard["corpus"].get("dataset", ""))
        whole = None if corpus is None else corpus.tokens * shard["test_fraction"]
        known = [number for number in (whole, config.get("max_tokens")) if number is not None]
        if not known:
            return None
        found += [_TestSet(length, min(known)) for length in config["lengths"]]
    return found
