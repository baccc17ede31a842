"""Theorem 1: heat maps of the state's Jacobian, explicit beside implicit, and its measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from implicit_llm.report.axes import tell_if_empty
from implicit_llm.report.heat_map import class_legend, draw_heat_map
from implicit_llm.report.jacobian_results import JacobianRow, jacobian_rows
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.svg import Figure, Panel
from implicit_llm.report.table_text import csv_text, escape, rounded, spread_columns, spread_values

NAME = "jacobian"
MAX_TRAINED = 4  # heat maps of trained models
SHARES = {"off_diagonal_share_hard": True, "off_diagonal_share_identity": False}
MEASURES = ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference")


def jacobian_section(given: SectionInputs) -> Section | None:
    """How the state before a token moves the state after it."""
    rows = jacobian_rows(given.inputs.records.get("jacobian", ()))
    if not rows and not any(hole.config.get("kind") == "jacobian" for hole in given.config.holes):
        return None
    files = {NAME: {"csv": _csv(rows), "tex": _latex(rows)}}
    return Section(NAME, "sections/jacobian.html.j2", rows, [_figure(rows)], files)


def _figure(rows: Sequence[JacobianRow]) -> Figure:
    shown = [row for row in rows if row.is_random] + [row for row in rows if not row.is_random][:MAX_TRAINED]
    panels = tuple(
        Panel(_title(row), partial(_draw, row=row), f"{row.name}: absolute values of the Jacobian") for row in shown
    )
    panels = panels or (Panel("Jacobian", _draw_nothing),)
    roles = tuple(dict.fromkeys(role for row in shown for role in row.cell.roles))
    return Figure(NAME, "Jacobian of the state transition", panels, class_legend(), roles)


def _title(row: JacobianRow) -> str:
    kind = "implicit" if row.first.is_implicit else "explicit"
    return row.name if kind in row.name else f"{row.name}, {kind}"


def _draw(axis: Axes, row: JacobianRow) -> None:
    picture = row.picture
    if picture is None or picture.entries is None:
        _draw_nothing(axis)
        return
    draw_heat_map(axis, picture.entries)
    axis.set(xlabel="entry of the state before the token", ylabel="after the token")


def _draw_nothing(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    tell_if_empty(axis, ())


def _csv(rows: Sequence[JacobianRow]) -> str:
    """One line a model; empty where there is no number."""
    head = ["model", "run", "phase", "kind", "setting", "data", "layer", "state_size"]
    head += ["num_tokens", "num_reached", *spread_columns((*MEASURES, *SHARES))]
    return csv_text(head, (_csv_row(row) for row in rows))


def _csv_row(row: JacobianRow) -> Iterator[object]:
    point = row.first
    yield from (row.name, point.run, point.phase, "implicit" if point.is_implicit else "explicit", point.setting)
    yield from (point.data, point.layer, point.state_size, len(row.cell.points), row.num_reached)
    for measure in MEASURES:
        yield from spread_values(row.spread(measure))
    for is_hard in SHARES.values():
        yield from spread_values(row.share_of(is_hard=is_hard))


def _latex(rows: Sequence[JacobianRow]) -> str:
    """Means over tokens, and the largest difference; needs the package booktabs."""
    lines = [
        "% means over tokens: share of the Jacobian's norm off the diagonal, spectral radii of the transition and of",
        "% df/dz; largest relative difference between the paper's formula and autograd",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"Model & off diagonal & $\rho(\partial h_t/\partial h_{t-1})$ & $\rho(\partial f/\partial z)$ & formula \\",
        r"\midrule",
    ]
    for row in rows:
        means = [rounded(row.spread(measure).mean) for measure in MEASURES[:3]]
        shown = ["--" if value is None else f"{value:.3g}" for value in (*means, row.worst_difference)]
        lines.append(" & ".join([escape(row.name), *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
