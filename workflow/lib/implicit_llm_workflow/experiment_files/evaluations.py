"""The evaluations of an experiment, and to which runs each of them applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, LM_EVAL, EvaluationKind
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.lm_eval_settings import lm_eval_settings


@dataclass(frozen=True)
class Evaluation:
    """`runs`: patterns of the runs it is done for; `sweep`: values of a mode's fields, each of which is evaluated.

    `settings`: those that belong to the kind, as its job is told them; what is left out keeps the job's default.
    """

    name: str
    kind: str
    runs: tuple[str, ...]
    modes: tuple[Mapping[str, Any], ...]
    sweep: Mapping[str, tuple[Any, ...]]
    settings: Mapping[str, Any]

    @property
    def modes_config(self) -> dict[str, Any]:
        """Modes and sweep as the job is told them."""
        found: dict[str, Any] = {"modes": [dict(mode) for mode in self.modes]} if self.modes else {}
        return found | ({"sweep": {key: list(values) for key, values in self.sweep.items()}} if self.sweep else {})

    def applies_to(self, run: str, data: DataSet) -> bool:
        """Whether it is done for the run of this name, trained on `data`."""
        return data.kind in EVALUATION_KINDS[self.kind].data and any(fnmatchcase(run, pattern) for pattern in self.runs)

    def repeats(self, other: Evaluation, *, is_implicit: bool | None) -> bool:
        """Whether both give the same number of a model they are done for; `is_implicit` None: not known.

        An explicit model has one mode, whatever the modes are called.
        """
        if self.kind != other.kind or self.sweep or other.sweep or not self.modes:
            return False
        mine, theirs = (
            self.settings.get(EVALUATION_KINDS[self.kind].parts),
            other.settings.get(EVALUATION_KINDS[self.kind].parts),
        )
        is_same_part = mine is None or theirs is None or not set(mine).isdisjoint(theirs)
        names = {mode["name"] for mode in self.modes}
        return is_same_part and (not is_implicit or any(mode["name"] in names for mode in other.modes))


def build_evaluation(name: str, item: Mapping[str, Any], source: str) -> Evaluation:
    """An evaluation from validated values. Raises: ConfigError that starts with `source`, the file."""
    at, kind = f"{source}: evaluations.{name}", EVALUATION_KINDS[item["kind"]]
    settings = {key: value for key, value in item.items() if key not in ("kind", "runs", "modes", "sweep")}
    foreign = next((key for key in settings if key not in kind.settings), None)
    if foreign is not None:
        owners = " or ".join(other for other, its in EVALUATION_KINDS.items() if foreign in its.settings)
        raise ConfigError(f"{at}.{foreign}: belongs to kind {owners}; remove it")
    evaluation = Evaluation(
        name=name,
        kind=item["kind"],
        runs=tuple(item.get("runs", ("*",))),
        modes=_modes(item, kind, at),
        sweep=_sweep(item.get("sweep", {})),
        settings=completed_settings(item["kind"], settings, at),
    )
    lengths = {"lengths": [2]} if kind.lengths is not None else {}  # which the data give where the file does not
    fill(kind.config, {"kind": evaluation.kind, **evaluation.modes_config, **lengths, **evaluation.settings}, at)
    return evaluation


def completed_settings(kind: str, settings: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """The settings as the job is told them: of the harness with the tasks of a suite and the digests of task files.

    Raises: ConfigError that starts with `at`.
    """
    return lm_eval_settings(settings, at) if kind == LM_EVAL else settings


def _modes(item: Mapping[str, Any], kind: EvaluationKind, at: str) -> tuple[Mapping[str, Any], ...]:
    modes = item.get("modes", ())
    if kind.has_modes and not modes:
        raise ConfigError(f"{at}.modes: is missing; add for example [{{name: blockwise, eval_mode: blockwise}}]")
    for key in ("modes", "sweep"):
        if key in item and not kind.has_modes:
            raise ConfigError(f"{at}.{key}: kind {item['kind']} has no modes; remove it")
    names = [mode["name"] for mode in modes]
    repeated = next((mode for mode in names if names.count(mode) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{at}.modes: two modes are called {repeated!r}; rename one")
    return tuple({key: float(value) if key == "eval_tol" else value for key, value in mode.items()} for mode in modes)


def _sweep(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(float(value) if key == "eval_tol" else value for value in values[key]) for key in sorted(values)}
