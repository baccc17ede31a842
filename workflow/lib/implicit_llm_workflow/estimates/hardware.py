"""The facts behind estimates: cards, measured training steps; from workflow/config/estimate/hardware.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.flops import max_evaluations, num_parameters, training_flops
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.models import model_fields
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.project_dirs import CONFIG_DIR

HARDWARE_FILE = CONFIG_DIR / "estimate/hardware.yaml"
FEW_EVALUATIONS = 8  # up to here a step is like the measured (4+1), beyond it like the measured free phases
STATE_BYTES = 12  # of a checkpoint, per parameter: the weights and AdamW's two moments in fp32
SAME_SIZE = 0.1  # models of a family whose numbers of parameters differ by less have the same throughput


@dataclass(frozen=True)
class Card:
    """A GPU. `peak_tflops` by precision; `utilisation`: share of the peak assumed where no step was measured."""

    name: str
    peak_tflops: Mapping[str, float]
    utilisation: float


@dataclass(frozen=True)
class Speed:
    """Model FLOPs per second of one GPU, and where the number comes from."""

    flops_per_s: float
    basis: str


@dataclass(frozen=True)
class MeasuredStep:
    """A timed training step of a library configuration; `f_evaluations` of a token, those with gradient included."""

    model: str
    solver: Mapping[str, Any] | None
    card: str
    precision: str
    length: int
    tokens_per_s: float
    f_evaluations: float
    commit: str
    date: str

    @cached_property
    def fields(self) -> dict[str, Any]:
        return model_fields(self.model, str(HARDWARE_FILE))

    @property
    def speed(self) -> Speed:
        per_token = training_flops(self.fields, self.length, self.solver, self.f_evaluations)
        return Speed(per_token * self.tokens_per_s, f"measured on {self.card}, commit {self.commit}")

    def is_like(self, model: Mapping[str, Any], solver: Mapping[str, Any] | None) -> bool:
        """Whether a job with this model and solver has the same family, size and phase."""
        ratio = num_parameters(model) / num_parameters(self.fields)
        is_same_family = model.get("model_type") == self.fields["model_type"]
        return is_same_family and abs(ratio - 1) < SAME_SIZE and _phase(solver) == _phase(self.solver)


@dataclass(frozen=True)
class Hardware:
    """The content of the file."""

    cards: Mapping[str, Card]
    scaling_efficiency: float
    smallest_parameters: float
    steps: tuple[MeasuredStep, ...]

    def card(self, name: str) -> Card:
        """Raises: ConfigError that names the nearest card."""
        if name not in self.cards:
            raise ConfigError(f"{HARDWARE_FILE}: cards: there is no {name!r}; {nearest(name, self.cards)}")
        return self.cards[name]

    def speed(
        self, model: Mapping[str, Any], solver: Mapping[str, Any] | None, precision: str, card: str
    ) -> Speed | None:
        """The throughput of the measured step of such a job on this card, or else the assumed share of the card's peak.

        None for an unknown card and one that lacks the precision, and for models so small that their FLOPs say nothing
        about their time.
        """
        facts = self.cards.get(card)
        peak_tflops = None if facts is None else facts.peak_tflops.get(precision)
        if facts is None or peak_tflops is None or num_parameters(model) < self.smallest_parameters:
            return None
        for step in self.steps:
            if (step.card, step.precision) == (card, precision) and step.is_like(model, solver):
                return step.speed
        share = facts.utilisation
        return Speed(share * peak_tflops * 1e12, f"{share:.0%} of the peak of {card}, assumed")


def read_hardware(path: Path = HARDWARE_FILE) -> Hardware:
    """Raises: ConfigError."""
    return fill(Hardware, read_yaml(path), str(path))


def _phase(solver: Mapping[str, Any] | None) -> str:
    """ "explicit"; "bounded" for few iterations, such as (4+1) or 4 unrolled; "free" for many."""
    if solver is None:
        return "explicit"
    return "bounded" if max_evaluations(solver) <= FEW_EVALUATIONS else "free"
