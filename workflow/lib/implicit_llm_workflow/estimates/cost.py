"""What a job will take: as long as it took before, or else what measured throughput says, or an assumed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.config.flops import UncountedModel, max_evaluations, num_parameters, training_flops
from implicit_llm_contracts.runs.identity import canonical_json
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import FREED, PROVENANCE, work_directory
from implicit_llm_workflow.estimates.hardware import Hardware, read_hardware
from implicit_llm_workflow.estimates.memory import STATE_BYTES, StepMemory, TrainedModel
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan

CPU: Literal["cpu"] = "cpu"
MODEL_BYTES = 4  # per parameter: a model is saved once more, in fp32
TOKEN_BYTES = 2  # token streams are uint16


@dataclass(frozen=True)
class Work:
    """What a job computes and keeps; None where it depends on text that is not here, or on a model of unknown size.

    `f_evaluations`: of a token of a training step, those with gradient included.
    """

    tokens: float | None = None
    flops: float | None = None
    f_evaluations: float | None = None
    disk_bytes: float | None = None
    download_bytes: float | None = None


@dataclass(frozen=True)
class Cost:
    """`hours`: of the GPUs that the job takes, added up, or of the job itself on a CPU; None if not known.

    `device`: what they were or would be spent on; `basis`: where the number comes from.
    """

    unit: Literal["gpu", "cpu"] | None
    hours: float | None
    device: str | None
    basis: str

    @property
    def is_assumed(self) -> bool:
        return self.basis.endswith("assumed")


UNKNOWN = Cost(None, None, None, "not known")
DONE_BEFORE = Cost(CPU, 0.0, CPU, "done before, is taken up again")


class CostModel:
    """Costs of the jobs of a plan. `card` and `gpus`: another card or number of GPUs than the facts assign."""

    def __init__(self, plan: Plan, card: str | None = None, gpus: int | None = None) -> None:
        self._plan, self._card, self._gpus = plan, card, gpus

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware()

    def of(self, node: Node) -> Cost:
        """What making the node's wanted result takes now."""
        work = work_directory(self._plan.run_dir(node), self._plan.identities[node.key].fingerprint)
        if (work / MANIFEST).is_file() and not (work / FREED).exists():
            return DONE_BEFORE
        return self.whole(node)

    def whole(self, node: Node) -> Cost:
        """What the job takes from its beginning; an earlier run of it, or of another seed, counts before any table."""
        for key, words in ((node.key, "as last time"), (node.seedless_key, "as another seed")):
            earlier, cost = self._recorded.get(key, (None, UNKNOWN))
            if earlier is not None and cost.hours is not None and self._is_of_wanted_card(cost):
                return _scaled(cost, earlier.config, node.config, words)
        return self._modelled(node)

    def recorded(self, node: Node) -> Cost:
        """What the result that is there took."""
        return self._recorded.get(node.key, (None, UNKNOWN))[1]

    def work(self, node: Node) -> Work:
        """What a training job, or a job that tokenises a known corpus, computes and keeps."""
        if node.stage == "train":
            return self._training_work(node)
        if node.stage == "data" and node.config["kind"] == "token_shard":
            corpus = self.hardware.corpora.get(node.config["corpus"].get("dataset", ""))
            if corpus is not None:
                tokens = corpus.tokens / node.config["num_shards"]
                return Work(tokens, disk_bytes=tokens * TOKEN_BYTES, download_bytes=corpus.download_gb * 1e9)
        return Work()

    def place(self, node: Node) -> tuple[str, int]:
        """Card and number of GPUs of a training job. Raises: ConfigError for a card that the facts do not have."""
        try:
            parameters = num_parameters(node.config["model"])
        except UncountedModel:
            parameters = 0
        card, gpus = self.hardware.assigned(node.config["task"], parameters)
        card, gpus = self._card or card, self._gpus or gpus
        self.hardware.card(card)
        batch_size = node.config["batch_size"]
        return card, max(size for size in range(1, gpus + 1) if batch_size % size == 0)

    def step(self, node: Node) -> StepMemory | None:
        """The largest micro-batch of a training job that fits its card; None if none does, or the size is unknown."""
        card, gpus = self.place(node)
        config, room = node.config, self.hardware.card(card).memory_gib * self.hardware.usable_memory
        trained = TrainedModel(
            config["model"],
            config["phase"]["solver"],
            self._length(node),
            config["precision"],
            has_logits=config["task"] != "language_model",
        )
        try:
            return trained.fitting_step(room, config["batch_size"] // gpus, gpus)
        except UncountedModel:
            return None

    def _modelled(self, node: Node) -> Cost:
        work = self.work(node)
        if node.stage == "data" and work.tokens is not None:
            hours = work.tokens / self.hardware.tokens_per_s_per_core / 3600
            return Cost(CPU, hours, CPU, "measured rate of tokenisation")
        if work.flops is None:
            return UNKNOWN
        card, gpus = self.place(node)
        config = node.config
        speed = self.hardware.speed(config["model"], config["phase"]["solver"], config["precision"], card)
        if speed is None:
            return UNKNOWN
        share = self.hardware.scaling_efficiency if gpus > 1 else 1.0
        return Cost("gpu", work.flops / speed.flops_per_s / share / 3600, card, speed.basis)

    def _training_work(self, node: Node) -> Work:
        model, phase, f_evaluations = node.config["model"], node.config["phase"], self._f_evaluations(node)
        length = self._length(node)
        tokens = (phase["end_step"] - phase["start_step"]) * node.config["batch_size"] * length
        try:
            flops = tokens * training_flops(model, length, phase["solver"], f_evaluations)
            # The last training state, those kept for branches, and the model stay.
            per_parameter = STATE_BYTES * (1 + len(phase.get("keep", []))) + MODEL_BYTES
            return Work(tokens, flops, f_evaluations, per_parameter * num_parameters(model))
        except UncountedModel:
            return Work(tokens, None, f_evaluations)

    def _length(self, node: Node) -> int:
        return int(self._plan.nodes[node.upstream["data"]].config["length"])

    def _is_of_wanted_card(self, cost: Cost) -> bool:
        return self._card is None or self.hardware.card(self._card).name.startswith(cost.device or "-")

    def _f_evaluations(self, node: Node) -> float:
        """Those of the finished job, or of another seed, with the same solver; else the most that it may do."""
        solver = node.config["phase"]["solver"]
        for key in (node.key, node.seedless_key):
            earlier, _ = self._recorded.get(key, (None, UNKNOWN))
            value = None if earlier is None else earlier.summary.get("metrics", {}).get("f_evaluations")
            if earlier is not None and value is not None and earlier.config["phase"]["solver"] == solver:
                return float(value)
        return max_evaluations(solver)

    @cached_property
    def _recorded(self) -> dict[str, tuple[Manifest, Cost]]:
        """Finished jobs, fresh or stale: by key, and by key without the seed."""
        found: dict[str, tuple[Manifest, Cost]] = {}
        for node in self._plan.nodes.values():
            run_dir = self._plan.run_dir(node)
            try:
                manifest = Manifest.of_run(run_dir)
            except ManifestError:
                continue
            if manifest is not None:
                found[node.key] = manifest, recorded_cost(run_dir, manifest.fingerprint) or UNKNOWN
                found.setdefault(node.seedless_key, found[node.key])
        return found


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
