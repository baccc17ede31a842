"""Which of several CatbAbI runs speaks: the most accurate on the validation set, whatever it does on the test set.

Runs compete that are equal in all that a claim compares by: kind, family, layers and training tokens. A grid over the
learning rate is one such field; batch sizes train on different numbers of tokens and are fields of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from implicit_llm.report.babi_results import BabiCell, BabiResults
from implicit_llm.report.equal_flops import is_close
from implicit_llm.report.model_groups import Variant

SAME_TOKENS = 0.01


@dataclass(frozen=True)
class Choice:
    """Runs that compete on a test set; `chosen` is None where several do and none has a validation number."""

    rivals: tuple[BabiCell, ...]
    chosen: BabiCell | None
    num_unvalidated: int

    @property
    def words(self) -> str:
        """How the run was chosen, to follow its name; empty where it is the only one."""
        if len(self.rivals) == 1:
            return ""
        without = f", {self.num_unvalidated} of them without a number there" if self.num_unvalidated else ""
        return f" [chosen of {len(self.rivals)} by accuracy on the validation set{without}]"


@dataclass(frozen=True)
class Field:
    """What is compared at equal layers and tokens; a kind that was not run is None."""

    num_layers: int | None
    family: str
    implicit: Choice | None
    explicit: Choice | None


def fields_of(results: BabiResults, data: str) -> tuple[Field, ...]:
    """The fields of the test set `data`, every run in the mode that speaks for it."""
    return tuple(
        Field(
            cells[0].first.num_layers,
            cells[0].first.family,
            *(
                _choose(results, [cell for cell in cells if cell.first.is_implicit is is_implicit])
                for is_implicit in (True, False)
            ),
        )
        for cells in _equal_cells(results.of(data, headline_only=True))
    )


def speaking_cells(results: BabiResults, data: str) -> list[BabiCell]:
    """The headline cells without those that others of their field were chosen over."""
    lost = {
        id(cell)
        for choice in _choices(results, data)
        for cell in choice.rivals
        if choice.chosen is not None and cell is not choice.chosen
    }
    return [cell for cell in results.of(data, headline_only=True) if id(cell) not in lost]


def chosen_variants(results: BabiResults, data: str) -> set[Variant]:
    """The runs, as one of their phases left them, that were chosen over others."""
    return {
        choice.chosen.first.variant
        for choice in _choices(results, data)
        if choice.chosen is not None and len(choice.rivals) > 1
    }


def marked_name(results: BabiResults, cell: BabiCell) -> str:
    """The name of a cell's line, which says so where its run was chosen over others."""
    is_chosen = cell.first.variant in chosen_variants(results, cell.first.data)
    return results.name(cell) + (" (chosen on validation)" if is_chosen else "")


def _choices(results: BabiResults, data: str) -> list[Choice]:
    return [choice for field in fields_of(results, data) for choice in (field.implicit, field.explicit) if choice]


def _equal_cells(cells: Sequence[BabiCell]) -> Iterator[list[BabiCell]]:
    """The cells by layers, family and tokens, fewest tokens first."""
    found: list[list[BabiCell]] = []
    for cell in sorted(cells, key=lambda cell: cell.first.train_tokens or 0.0):
        mine = (group for group in found if _is_equal(group[0], cell))
        group = next(mine, None)
        if group is None:
            found.append([cell])
        else:
            group.append(cell)
    yield from found


def _is_equal(first: BabiCell, other: BabiCell) -> bool:
    mine, its = first.first, other.first
    is_alike = (mine.num_layers, mine.family) == (its.num_layers, its.family)
    return is_alike and is_close(mine.train_tokens, its.train_tokens, SAME_TOKENS)


def _choose(results: BabiResults, rivals: Sequence[BabiCell]) -> Choice | None:
    if not rivals:
        return None
    if len(rivals) == 1:
        return Choice(tuple(rivals), rivals[0], 0)
    scores = {id(cell): results.validation(cell).mean for cell in rivals}
    scored = [cell for cell in rivals if scores[id(cell)] is not None]
    best = max(scored, key=lambda cell: scores[id(cell)] or 0.0, default=None)
    return Choice(tuple(rivals), best, len(rivals) - len(scored))
