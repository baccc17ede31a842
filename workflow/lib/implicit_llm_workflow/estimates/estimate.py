"""What an experiment takes: FLOPs, GPU-hours, memory and disk of its training jobs; tokenisation of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from implicit_llm_contracts.config.flops import UncountedModel, max_evaluations, num_parameters, training_flops
from implicit_llm_contracts.runs.identity import canonical_json
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError
from implicit_llm_workflow.estimates.hardware import Hardware
from implicit_llm_workflow.estimates.throughput import Price, Throughput, TrainingWork, executed_share, variant_of
from implicit_llm_workflow.estimates.training_memory import StepMemory, TrainedModel, fitting_step
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan

# A training state is the fp32 weights and AdamW's two moments; the model itself is saved once more, in fp32.
CHECKPOINT_BYTES, MODEL_BYTES = 12, 4


@dataclass(frozen=True)
class Evaluations:
    """f-evaluations for a token of a training step, and where the number comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class TrainingEstimate:
    """One training job. `prices`: GPU-hours by card, None where the precision does not run; numbers that need the size
    of an unknown model are None. `step`: what fits on the assigned card, None if nothing does.
    """

    key: str
    run: str
    seed: int
    phase: str
    precision: str
    tokens: int
    f_evaluations: Evaluations
    flops: float | None
    prices: Mapping[str, Price | None]
    card: str
    gpus: int
    step: StepMemory | None
    disk_bytes: int | None
    is_finished: bool

    @property
    def gpu_hours(self) -> float | None:
        """On the assigned card."""
        price = self.prices.get(self.card)
        return None if price is None else price.gpu_hours


@dataclass(frozen=True)
class Choice:
    """Another card or number of GPUs than the facts assign."""

    card: str | None = None
    gpus: int | None = None


class TrainingEstimator:
    """Estimates the training jobs of a plan; makes no identities, so that it costs no code digests."""

    def __init__(self, plan: Plan, hardware: Hardware, choice: Choice | None = None) -> None:
        self._plan, self._hardware = plan, hardware
        self._choice = choice or Choice()
        self._throughput = Throughput(hardware)

    def all(self) -> list[TrainingEstimate]:
        """In the order of the plan."""
        return [self.of(node) for node in self._plan.nodes.values() if node.stage == "train"]

    def of(self, node: Node) -> TrainingEstimate:
        """The estimate of one training job."""
        config, phase, solver = node.config, node.config["phase"], node.config["phase"]["solver"]
        length = self._plan.nodes[node.upstream["data"]].config["length"]
        tokens = (phase["end_step"] - phase["start_step"]) * config["batch_size"] * length
        evaluations = self._f_evaluations(node)
        per_token, parameters = self._model_flops(config, length, solver, evaluations.value)
        flops = None if per_token is None else per_token * tokens
        card, gpus = self._place(config, parameters)
        trained = TrainedModel(config["model"], solver, length, config["precision"])
        room = self._hardware.card(card).memory_gib * self._hardware.usable_memory
        step = None if parameters is None else fitting_step(trained, room, config["batch_size"] // gpus)
        again = executed_share(solver, evaluations.value) if step is not None and step.is_recomputed else 1.0
        return TrainingEstimate(
            key=node.key,
            run=node.run or node.name,
            seed=config["seed"],
            phase=phase["name"],
            precision=config["precision"],
            tokens=tokens,
            f_evaluations=evaluations,
            flops=flops,
            prices=self._prices(trained, None if flops is None else (flops, flops * again), gpus),
            card=card,
            gpus=gpus,
            step=step,
            disk_bytes=None if parameters is None else _disk_bytes(phase, parameters),
            is_finished=node.key in self._recorded,
        )

    def _model_flops(
        self, config: Mapping[str, Any], length: int, solver: Mapping[str, Any] | None, evaluations: float
    ) -> tuple[float | None, int | None]:
        """FLOPs per token and parameters; None for a model whose configuration is not known here."""
        try:
            per_token = training_flops(config["model"], length, solver, evaluations)
            return per_token, num_parameters(config["model"])
        except UncountedModel:
            return None, None

    def _place(self, config: Mapping[str, Any], parameters: int | None) -> tuple[str, int]:
        card, gpus = self._hardware.assigned(config["task"], parameters or 0)
        card, gpus = self._choice.card or card, self._choice.gpus or gpus
        self._hardware.card(card)
        return card, max(size for size in range(1, gpus + 1) if config["batch_size"] % size == 0)

    def _prices(self, trained: TrainedModel, flops: tuple[float, float] | None, gpus: int) -> dict[str, Price | None]:
        """GPU-hours by card. flops: of the model, and with what is computed again."""
        if flops is None:
            return dict.fromkeys(self._hardware.cards)
        scaling = self._hardware.scaling_efficiency if gpus > 1 else 1.0
        work = TrainingWork(
            family=trained.model["model_type"],
            variant=variant_of(trained.solver),
            parameters=num_parameters(trained.model),
            precision=trained.precision,
            flops=flops[0] / scaling,
            executed_flops=flops[1] / scaling,
        )
        return {card: self._throughput.price(work, card) for card in self._hardware.cards}

    def _f_evaluations(self, node: Node) -> Evaluations:
        """Measured by this job, by another seed, by any job with the same solver; else as many as the solver may do."""
        solver = node.config["phase"]["solver"]
        most = max_evaluations(solver)
        if solver is None or solver.get("mode") == "unrolled":
            return Evaluations(most, "fixed")
        for key, source in (
            (node.key, "measured"),
            (node.seedless_key, "measured with another seed"),
            (canonical_json(solver), "measured with the same solver"),
        ):
            if key in self._measured:
                return Evaluations(self._measured[key], source)
        return Evaluations(most, "upper bound")

    @cached_property
    def _recorded(self) -> dict[str, Manifest]:
        """Manifests of the training jobs that are finished, fresh or stale, by key."""
        found = {}
        for node in self._plan.nodes.values():
            if node.stage == "train":
                try:
                    recorded = Manifest.of_run(self._plan.run_dir(node))
                except ManifestError:
                    continue
                if recorded is not None:
                    found[node.key] = recorded
        return found

    @cached_property
    def _measured(self) -> dict[str, float]:
        """f-evaluations of finished jobs whose solver is still the wanted one: by key, by run and by solver."""
        values: dict[str, float] = {}
        for key, recorded in self._recorded.items():
            node = self._plan.nodes[key]
            solver = node.config["phase"]["solver"]
            value = recorded.summary.get("metrics", {}).get("f_evaluations")
            if solver is not None and value is not None and recorded.config.get("phase", {}).get("solver") == solver:
                values[key] = value
                values.setdefault(node.seedless_key, value)
                values.setdefault(canonical_json(solver), value)
        return values


def _disk_bytes(phase: Mapping[str, Any], parameters: int) -> int:
    """What stays: the last training state, those kept for branches, and the model."""
    return parameters * (CHECKPOINT_BYTES * (1 + len(phase.get("keep", []))) + MODEL_BYTES)
