"""Read registry.yaml for report and driver: the figures and tables, their captions, and what each needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from implicit_llm_contracts.plugins import Kinds
from implicit_llm_report.config import FOLDER, read_yaml


@dataclass(frozen=True)
class Entry:
    """A figure or a table, with the first lines of registry.yaml as its documentation; these are the keys of a table.

    title, text: its head on the page. by: columns of the frame that make a table each. rows: those that make a row.
    across: the column whose values stand side by side, each with the first of `metrics`; without it all of `metrics`
    do, which are metrics with their heads. over: what the spread is taken over. foot: a metric of the test itself.
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
        """Whether an experiment with these planned results has it."""
        wanted = {"swept": (), "is_peer": False, **self.needs}
        differ, among = wanted.pop("differ", None), wanted.pop("among", ())
        found = [result for result in planned if all(_agrees(result.get(key), wanted[key]) for key in wanted)]
        if differ is None:
            return bool(found) or not self.needs
        same = {tuple(result[key] for key in among) for result in found}
        return len({tuple(result[key] for key in (*among, differ)) for result in found}) > len(same)


@dataclass(frozen=True)
class ReportRegistry:
    """The registered entries by name, in the order in which Snakemake lists them."""

    figures: Mapping[str, Entry]
    tables: Mapping[str, Entry]


@cache
def registry() -> ReportRegistry:
    """Raises: UserError naming file and key."""
    return read_yaml(FOLDER / "registry.yaml", ReportRegistry)


def figures_with(kinds: Kinds) -> dict[str, Entry]:
    """The figures of registry.yaml and those of plugins, by name."""
    return {**registry().figures, **{name: Entry(own.needs, own.caption) for name, own in kinds.figures.items()}}


def _agrees(value: Any, wanted: Any) -> bool:
    """A result with several values has one that is wanted; wanting none, it must have none."""
    if wanted == ():
        return not value
    return bool(set(_listed(value)) & set(_listed(wanted)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
