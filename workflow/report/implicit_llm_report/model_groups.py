"""Which models are compared with each other, and what their lines are called.

A group is one kind of model (Mamba2, Llama) at one size, trained on one data set. Implicit models have a few parameters
more than explicit ones of the same width; sizes within a factor of 1.3 are one size, which keeps the published ladder
(130M, 370M, 760M, 1.3B) apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SAME_SIZE = 1.3
FAMILIES = {"implicit_mamba2": "Mamba2", "implicit_llama3": "Llama", "mamba2": "Mamba2", "llama": "Llama"}


def family_of(model_type: str | None) -> str:
    """The family's name; a type that is none of the known ones is its own name."""
    return FAMILIES.get(model_type or "", model_type or "model")


@dataclass(frozen=True)
class Model:
    """What decides the group of a run."""

    run: str
    is_implicit: bool
    model_type: str | None
    num_parameters: int | None
    data: str | None = None

    @property
    def family(self) -> str:
        return family_of(self.model_type)


@dataclass(frozen=True)
class ModelGroup:
    """Runs that are compared; explicit runs after implicit ones."""

    family: str
    models: tuple[Model, ...]

    @property
    def title(self) -> str:
        sizes = sorted({model.num_parameters for model in self.models if model.num_parameters is not None})
        words = list(dict.fromkeys(short_count(float(f"{size:.3g}")) for size in sizes))
        return (
            f"{self.family}, {'–'.join((words[0], words[-1])) if len(words) > 1 else words[0]}"
            if words
            else self.family
        )

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(model.run for model in self.models)

    def name(
        self, run: str, phase: str | None, label: str | None, phases: Mapping[Any, str | None], *, is_implicit: bool
    ) -> str:
        """The name of a line: "explicit", "implicit (24+4)"; of several runs of one kind each by its own name.

        `phases`: all of the run with their labels; phases that share a label keep their own names.
        """
        stem = self.run_name(run, is_implicit=is_implicit)
        if not is_implicit:
            return stem
        is_unique = list(phases.values()).count(label) <= 1
        return " ".join(word for word in (stem, label, "" if is_unique else phase) if word)

    def name_of(self, line: Any, siblings: Iterable[Any]) -> str:
        """The name of a group of rows among others."""
        phases = {other.phase: other.phase_label for other in siblings if other.run == line.run}
        return self.name(line.run, line.phase, line.phase_label, phases, is_implicit=line.is_implicit)

    def run_name(self, run: str, *, is_implicit: bool) -> str:
        """ "explicit" for the only explicit run, the run's own name where there are several."""
        alike = [model.run for model in self.models if model.is_implicit == is_implicit]
        return ("implicit" if is_implicit else "explicit") if len(alike) <= 1 else run


def group_models(models: Iterable[Model]) -> tuple[ModelGroup, ...]:
    """The groups, by family, size and data; each run once."""
    by_run = {model.run: model for model in models}
    ordered = sorted(by_run.values(), key=lambda m: (m.family, m.data or "", m.num_parameters or 0, m.run))
    groups: list[list[Model]] = []
    for model in ordered:
        if groups and _is_same(groups[-1][0], model):
            groups[-1].append(model)
        else:
            groups.append([model])
    return tuple(
        ModelGroup(
            group[0].family,
            tuple(sorted(group, key=lambda model: (not model.is_implicit, model.run))),
        )
        for group in groups
    )


def short_count(count: float) -> str:
    """ "131.6M", "1.32B", "41.9k"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:g}"


def _is_same(first: Model, other: Model) -> bool:
    if (first.family, first.data) != (other.family, other.data):
        return False
    if first.num_parameters is None or other.num_parameters is None:
        return first.num_parameters == other.num_parameters
    return other.num_parameters <= SAME_SIZE * first.num_parameters
