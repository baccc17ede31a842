"""Read registry.yaml for report and driver: the figures and tables, their captions, and the results that each needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from implicit_llm_contracts.plugins import Kinds
from implicit_llm_report.config import FOLDER, read_yaml


@dataclass(frozen=True)
class Entry:
    """A figure or a table; registry.yaml documents `needs`. Only tables have the fields after `caption`.

    `by`, `rows`, `across` and `over` name columns of the frame (inputs/frame.py). title, text: the heading and text
    above the tables. by: each combination of values in these columns has a table. rows: each combination of values in
    these columns has a row in its table. across: the values of this column head the columns of a table. All cells then
    show the first metric, or each cell its own metric if `metrics` is empty. Without `across`, each metric has a
    column. metrics: the headings by metric. over: the column over which the spread is computed. foot: a metric of the
    test itself, shown in the last row.
    """

    needs: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    title: str = ""
    text: str = ""
    by: tuple[str, ...] = ()
    rows: tuple[str, ...] = ("name", "mode")
    across: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    over: str = "seed"
    foot: str | None = None

    def is_met(self, planned: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an experiment with these planned results has the figure or table."""
        wanted = {"swept": (), "is_peer": False, **self.needs}
        differ, among = wanted.pop("differ", None), wanted.pop("among", ())
        found = [result for result in planned if all(_agrees(result.get(key), wanted[key]) for key in wanted)]
        if differ is None:
            return bool(found) or not self.needs
        same = {tuple(result.get(key) for key in among) for result in found}
        return len({tuple(result.get(key) for key in (*among, differ)) for result in found}) > len(same)


@dataclass(frozen=True)
class ReportRegistry:
    """The entries of registry.yaml by name, in the order of the file."""

    figures: Mapping[str, Entry]
    tables: Mapping[str, Entry]


@cache
def registry() -> ReportRegistry:
    """Return the content of registry.yaml. Raises: UserError that names file and key."""
    return read_yaml(FOLDER / "registry.yaml", ReportRegistry)


def figures_with(kinds: Kinds) -> dict[str, Entry]:
    """Return the figures of registry.yaml and those of plugins, by name."""
    return {**registry().figures, **{name: Entry(own.needs, own.caption) for name, own in kinds.figures.items()}}


def _agrees(value: Any, wanted: Any) -> bool:
    """Return whether `value` is or lists one of the wanted values; if `wanted` is (), whether there is no value."""
    if wanted == ():
        return not value
    return bool(set(listed(value)) & set(listed(wanted)))


def listed(value: Any) -> list[Any]:
    """Return the values of a key of `needs`, which is one value or a list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
