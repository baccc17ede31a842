"""What a verdict rests on."""

from __future__ import annotations

from dataclasses import dataclass

from implicit_llm.report.results import Cell, Point, Spread, seeds_words


@dataclass(frozen=True)
class Evidence:
    """`text` for the reader, and the evaluations by their roles."""

    text: str
    run: str
    data: str
    modes: tuple[str, ...]
    num_seeds: int
    roles: tuple[str, ...]

    @classmethod
    def of_cells(cls, cells: tuple[Cell[Point], ...], spread: Spread) -> Evidence:
        point, modes = cells[0].first, tuple(cell.first.mode for cell in cells)
        hard = f"{100 * point.hard_fractions[-1]:g} % hard"
        text = f"{point.run}, {' and '.join(modes)}, length {point.length}, {hard}, {seeds_words(spread)}"
        roles = tuple(sorted({role for cell in cells for role in cell.roles}))
        return cls(text, point.run, point.data, modes, len(spread.values), roles)
