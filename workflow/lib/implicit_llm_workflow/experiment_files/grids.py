"""Grids: one entry of `runs` that stands for a run at every point of some axes."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from implicit_llm_contracts.config.values import SOME, matching
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError

_ROOTS = ("curriculum", "data", "model", "override", "task")
_LABEL = re.compile(r"[A-Za-z0-9._-]+")


AxisName = Annotated[str, matching(r"[a-z][a-z_]*", "lower-case letters, beginning with a letter")]
_Path = Annotated[
    str,
    matching(
        r"[A-Za-z_][A-Za-z0-9_-]*([.][A-Za-z_][A-Za-z0-9_-]*)*",
        "keys joined by dots, for example override.task.batch_size",
    ),
]


@dataclass(frozen=True)
class Axis:
    """`key`: path of what the axis changes in the run, such as override.task.batch_size, or model, task or data."""

    key: _Path
    values: Annotated[tuple[int | float | str, ...], SOME]


def expand_grids(runs: Mapping[str, Any], source: str) -> dict[str, tuple[Mapping[str, Any], str]]:
    """All runs by name, each entry with a grid replaced by its points, in the order of the file.

    Beside each run, for messages, which point it is, "" for an entry without a grid. Raises: ConfigError that names the
    axis, or for two runs of one name.
    """
    found: dict[str, tuple[Mapping[str, Any], str]] = {}
    for entry, item in runs.items():
        for name, run, at in _points(entry, item, source):
            if name in found:
                raise ConfigError(f"{source}: runs: two runs are called {name!r}; rename a run or a grid axis")
            found[name] = run, at
    return found


def _points(name: str, item: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    axes: Mapping[str, Any] = item.get("grid", {})
    base = {key: value for key, value in item.items() if key != "grid"}
    where = f"{source}: runs.{name}.grid"
    keys = [axis["key"] for axis in axes.values()]
    for axis, values in axes.items():
        _check_axis(values, keys, f"{where}.{axis}")
    for combination in itertools.product(*(axis["values"] for axis in axes.values())):
        point, labels = base, {}
        for (axis, values), value in zip(axes.items(), combination, strict=True):
            point = _with_value(point, values["key"].split("."), value, f"{where}.{axis}.key")
            labels[axis] = _label(value)
        at = ", ".join(f"{axis} = {label}" for axis, label in labels.items())
        chosen = [f"{axis}{label}" for axis, label in labels.items()]
        yield "-".join([name, *chosen]), point, f"runs.{name}.grid: {at}" if at else ""


def _check_axis(axis: Mapping[str, Any], keys: list[str], where: str) -> None:
    key = axis["key"]
    root = key.partition(".")[0]
    if root not in _ROOTS or (root == "override") != ("." in key):
        hint = nearest(root, _ROOTS) if root not in _ROOTS else "give override.model.hidden_size, or model alone"
        raise ConfigError(f"{where}.key: {key!r} is no path to a setting of a run; {hint}")
    if keys.count(key) > 1:
        raise ConfigError(f"{where}.key: two axes change {key}; remove one")
    labels = [_label(value) for value in axis["values"]]
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise ConfigError(
                f"{where}.values: {label!r} cannot be part of a run's name; give a number or a plain name"
            )
        if labels.count(label) > 1:
            raise ConfigError(f"{where}.values: two values are written {label!r}; remove one")


def _with_value(item: Mapping[str, Any], path: list[str], value: Any, where: str) -> dict[str, Any]:
    """`item` with the value at the path, mappings on the way made where they are missing."""
    key, *rest = path
    if not rest:
        return {**item, key: value}
    below = item.get(key, {})
    if not isinstance(below, Mapping):
        raise ConfigError(f"{where}: {key!r} is {below!r} and has no keys below it; shorten the path")
    return {**item, key: _with_value(below, rest, value, where)}


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
