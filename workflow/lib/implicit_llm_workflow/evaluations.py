"""The evaluations of an experiment, and to which data each of them applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_workflow.data_sets import CATBABI, LANGUAGE_MODEL, WORD_PROBLEM, DataSet
from implicit_llm_workflow.errors import ConfigError

PERPLEXITY = "perplexity"
_PERPLEXITY_SETTINGS = ("max_tokens", "precision")

# Kind of an evaluation -> the kind of data that it applies to.
DATA_KINDS = {WORD_PROBLEM: WORD_PROBLEM, CATBABI: CATBABI, PERPLEXITY: LANGUAGE_MODEL}


@dataclass(frozen=True)
class Evaluation:
    """`settings`: those that belong to the kind, as its job is told them; what is left out keeps the job's default."""

    name: str
    kind: str
    modes: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any]

    def applies_to(self, data: DataSet) -> bool:
        return DATA_KINDS[self.kind] == data.kind


def build_evaluation(name: str, item: Mapping[str, Any], source: str) -> Evaluation:
    """An evaluation from validated values. Raises: ConfigError that starts with `source`, the file."""
    names = [mode["name"] for mode in item["modes"]]
    repeated = next((mode for mode in names if names.count(mode) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{source}: evaluations.{name}.modes: two modes are called {repeated!r}; rename one")
    settings = {key: item[key] for key in _PERPLEXITY_SETTINGS if key in item}
    if settings and item["kind"] != PERPLEXITY:
        raise ConfigError(f"{source}: evaluations.{name}.{next(iter(settings))}: belongs to kind perplexity; remove it")
    modes = tuple(
        {key: float(value) if key == "eval_tol" else value for key, value in mode.items()} for mode in item["modes"]
    )
    return Evaluation(name, item["kind"], modes, settings)
