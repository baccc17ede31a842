"""What a job will take: as long as it took before, or else what the throughput model says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.identity import canonical_json
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import FREED, PROVENANCE, work_directory
from implicit_llm_workflow.estimates.data_estimate import TokenisationRate, data_estimate, tokenisation_rate
from implicit_llm_workflow.estimates.estimate import TrainingEstimator
from implicit_llm_workflow.estimates.evaluation_estimate import EvaluationEstimate, evaluation_estimates
from implicit_llm_workflow.estimates.hardware import Hardware, read_hardware
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan

CPU: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class Cost:
    """`hours`: of the GPUs that the job takes, added up, or of the job itself on a CPU; None where nothing tells them.

    `device`: what they were or would be spent on; `basis`: how the number was come by.
    """

    unit: Literal["gpu", "cpu"] | None
    hours: float | None
    device: str | None
    basis: str


UNKNOWN = Cost(None, None, None, "not known")
NO_MODEL = Cost(None, None, None, "not known: the measurements that `implicit-llm estimate` needs cannot be read")
DONE_BEFORE = Cost(CPU, 0.0, CPU, "done before, is taken up again")


class CostModel:
    """Costs of the jobs of a plan; earlier runs and estimates are read when first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def of(self, node: Node) -> Cost:
        """What making the node's wanted result takes."""
        work = work_directory(self._plan.run_dir(node), self._plan.identities[node.key].fingerprint)
        if (work / MANIFEST).is_file() and not (work / FREED).exists():
            return DONE_BEFORE
        for key, words in ((node.key, "as last time"), (node.seedless_key, "as another seed")):
            if key in self._took:
                earlier, cost = self._took[key]
                return _scaled(cost, earlier.config, node.config, words)
        return self._modelled(node)

    def recorded(self, node: Node) -> Cost:
        """What the result that is there took."""
        found = self._took.get(node.key)
        return found[1] if found is not None else UNKNOWN

    @cached_property
    def _took(self) -> dict[str, tuple[Manifest, Cost]]:
        """By key, and by key without its seed."""
        found: dict[str, tuple[Manifest, Cost]] = {}
        for node in self._plan.nodes.values():
            run_dir = self._plan.run_dir(node)
            try:
                recorded = Manifest.of_run(run_dir)
            except ManifestError:
                continue
            cost = recorded_cost(run_dir, recorded.fingerprint) if recorded is not None else None
            if recorded is not None and cost is not None:
                found[node.key] = (recorded, cost)
                found.setdefault(node.seedless_key, (recorded, cost))
        return found

    def _modelled(self, node: Node) -> Cost:
        if self._training is None:
            return NO_MODEL
        if node.stage == "data":
            hours = data_estimate(node.name, node.config, *self._tokenisation).core_hours
            return UNKNOWN if hours is None else Cost(CPU, hours, CPU, "rate of tokenisation")
        if node.stage == "train":
            estimate = self._training.of(node)
            price, card = estimate.prices.get(estimate.card), estimate.card
        elif node.key in self._evaluations:
            card = self._training.of(self._plan.nodes[node.upstream["model"]]).card
            price = self._evaluations[node.key].prices.get(card)
        else:
            return UNKNOWN
        return UNKNOWN if price is None else Cost("gpu", price.gpu_hours, card, f"model of throughput ({price.basis})")

    @cached_property
    def _training(self) -> TrainingEstimator | None:
        """None where the measured steps, which lie below results/, cannot be read."""
        try:
            return TrainingEstimator(self._plan, read_hardware())
        except ConfigError:
            return None

    @cached_property
    def _tokenisation(self) -> tuple[Hardware, TokenisationRate]:
        hardware = read_hardware()
        return hardware, tokenisation_rate(hardware)

    @cached_property
    def _evaluations(self) -> dict[str, EvaluationEstimate]:
        """Those of models that are trained here, by key."""
        found = {item.key: item for item in evaluation_estimates(self._plan, read_hardware())}
        nodes = self._plan.nodes
        return {key: item for key, item in found.items() if nodes[nodes[key].upstream["model"]].stage == "train"}


def recorded_cost(run_dir: Path, fingerprint: str) -> Cost | None:
    """What the attempts of a finished job took together; None where that was not recorded."""
    for path in (work_directory(run_dir, fingerprint) / PROVENANCE, run_dir / PROVENANCE):
        try:
            values = json.loads(path.read_bytes())
            if values["fingerprint"] != fingerprint:
                continue
            hours = sum(attempt["busy_s"] for attempt in values["attempts"]) / 3600
            device = values["device"]
            if device == CPU:
                return Cost(CPU, hours, CPU, "recorded")
            return Cost("gpu", hours * _processes(values["argv"]), device, "recorded")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _processes(argv: list[str]) -> int:
    """Processes of all nodes, one for each GPU, by the job's own command."""
    words = [part for word in argv for part in word.split("=", 1)]
    return math.prod(int(count) for option, count in pairwise(words) if option in ("--nodes", "--processes-per-node"))


def _scaled(cost: Cost, old: Mapping[str, Any], new: Mapping[str, Any], words: str) -> Cost:
    """By the sequences of training where these were changed; other settings are said, not counted."""
    if canonical_json({**old, "seed": 0}) == canonical_json({**new, "seed": 0}):
        return Cost(cost.unit, cost.hours, cost.device, words)
    before, now = _sequences(old), _sequences(new)
    factor = now / before if before and now else 1.0
    scaled = f" x {factor:.3g}" if factor != 1 else ""
    return Cost(cost.unit, (cost.hours or 0.0) * factor, cost.device, f"{words}{scaled}, with other settings")


def _sequences(config: Mapping[str, Any]) -> float | None:
    try:
        return (config["phase"]["end_step"] - config["phase"]["start_step"]) * config["batch_size"]
    except (KeyError, TypeError):
        return None
