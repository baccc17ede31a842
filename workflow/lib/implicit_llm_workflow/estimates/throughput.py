"""How long a GPU takes for a training job: measured steps, carried over to other sizes and cards.

A step takes the time of its matrix products at the card's reachable peak, and the rest: launches and passes over
memory. Measured steps give the sum; between sizes it is interpolated, and on another card the rest grows with the
inverse of the bandwidth, with the bytes of a number, and with the card's overhead factor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.flops import (
    differentiated_evaluations,
    max_evaluations,
    num_parameters,
    training_flops,
)
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.estimates.hardware import HARDWARE_FILE, Hardware, MeasuredStep
from implicit_llm_workflow.project_dirs import package_dir

BOUNDED_EVALUATIONS = 8  # up to here a step is like the measured (4+1), beyond like the measured free phases
OTHER_FAMILIES = "implicit_llama3"  # whose measured steps stand for models of another type
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class TrainingWork:
    """What a training job computes. flops: model FLOPs; executed_flops: with what is computed again."""

    family: str
    variant: str
    parameters: int
    precision: str
    flops: float
    executed_flops: float


@dataclass(frozen=True)
class Price:
    """gpu_hours on one GPU; utilisation: model FLOPs over the card's peak; basis: how the number was come by."""

    gpu_hours: float
    utilisation: float
    basis: str  # "measured", "interpolated" or "assumed"


@dataclass(frozen=True)
class _Point:
    step: MeasuredStep
    parameters: int
    s_per_flop: float


class Throughput:
    """Prices training jobs. Raises: ConfigError when a measured step cannot be read."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        points: dict[tuple[str, str], list[_Point]] = {}
        for step in hardware.steps:
            family, variant, point = _point(step)
            points.setdefault((family, variant), []).append(point)
        self._points = {key: sorted(found, key=lambda point: point.parameters) for key, found in points.items()}

    def price(self, work: TrainingWork, card_name: str) -> Price | None:
        """GPU-hours on one GPU of the card.

        None where the card does not have the precision, and for models so much smaller than all measured ones that
        their FLOPs say nothing about their time.
        """
        card = self._hardware.card(card_name)
        peak = card.peak_tflops.get(work.precision)
        points = self._measured(work)
        if peak is None or work.parameters < points[0].parameters / 4:
            return None
        s_per_flop, point = _interpolate(points, work.parameters)
        measured = self._hardware.card(point.step.card)
        products = 1 / (measured.matmul_efficiency * measured.peak_tflops[point.step.precision] * 1e12)
        rest = max(0.0, s_per_flop - products)
        rest *= measured.bandwidth_tb_s / card.bandwidth_tb_s * card.overhead_factor / measured.overhead_factor
        rest *= BYTES[work.precision] / BYTES[point.step.precision]
        seconds = work.executed_flops * (1 / (card.matmul_efficiency * peak * 1e12) + rest)
        utilisation = work.flops / (seconds * peak * 1e12) if seconds else 0.0
        return Price(seconds / 3600, utilisation, self._basis(work, card_name, point))

    def _measured(self, work: TrainingWork) -> list[_Point]:
        """The steps of the family and variant; of all variants when none of this one is of such a size."""
        family = work.family if any(family == work.family for family, _ in self._points) else OTHER_FAMILIES
        mine = self._points.get((family, work.variant), [])
        if any(work.parameters > point.parameters / 4 for point in mine):
            return mine
        found = [point for (name, _), points in self._points.items() if name == family for point in points]
        return sorted(found, key=lambda point: point.parameters)

    def _basis(self, work: TrainingWork, card_name: str, point: _Point) -> str:
        if point.step.card != card_name or point.step.precision != work.precision:
            return "assumed"
        return "measured" if abs(point.parameters / work.parameters - 1) < 0.02 else "interpolated"


def variant_of(solver: Mapping[str, Any] | None) -> str:
    """ "explicit"; "bounded" for few iterations, such as (4+1) or 4 unrolled; "free" for many."""
    if solver is None:
        return "explicit"
    most = max_evaluations(solver)
    return "bounded" if most <= BOUNDED_EVALUATIONS else "free"


def executed_share(solver: Mapping[str, Any] | None, f_evaluations: float) -> float:
    """FLOPs of the layer stack with recomputation over those without: each differentiated evaluation once more."""
    differentiated = differentiated_evaluations(solver)
    needed = f_evaluations + 2 * differentiated
    return (needed + differentiated) / needed


def _point(step: MeasuredStep) -> tuple[str, str, _Point]:
    path = package_dir() / "configs" / step.config / "config.json"
    try:
        model = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{HARDWARE_FILE}: {step.source}: the library has no configuration {step.config!r}; correct its name there"
        ) from error
    solver = step.solver if step.solver is not None else model.get("solver") if model["is_implicit"] else None
    evaluations: float = max_evaluations(solver)
    if step.solver_iterations is not None:
        evaluations = step.solver_iterations + differentiated_evaluations(solver)
    work = training_flops(model, step.length, solver, evaluations) * step.micro_batch * step.length
    if step.is_recomputed:
        work *= executed_share(solver, evaluations)
    parameters = num_parameters(model)
    return model["model_type"], variant_of(solver), _Point(step, parameters, step.step_ms / 1000 / work)


def _interpolate(points: list[_Point], parameters: int) -> tuple[float, _Point]:
    """Seconds per FLOP between the sizes, linear in the logarithms; and the nearest measured point."""
    nearest = min(points, key=lambda point: abs(math.log(point.parameters / parameters)))
    below = [point for point in points if point.parameters <= parameters]
    above = [point for point in points if point.parameters > parameters]
    if not below or not above:
        return nearest.s_per_flop, nearest
    low, high = below[-1], above[0]
    share = math.log(parameters / low.parameters) / math.log(high.parameters / low.parameters)
    return low.s_per_flop ** (1 - share) * high.s_per_flop**share, nearest
