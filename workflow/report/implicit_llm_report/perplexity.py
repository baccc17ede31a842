"""Measured perplexities: models of one family and size on one test set, as tables; and at equal training FLOPs.

A line is a model in a mode on a test set over all lengths, a cell is a line at one length, over its seeds.

Where there is an explicit run whose training took as many FLOPs within 10 % (one trained for longer), the held-out
perplexities at the training length are compared. Elsewhere it is the smoothed training loss of both at the largest
number of FLOPs that both have reached. That favours the cheaper run: its learning rate has decayed there, the other's
has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from implicit_llm_report.frame import Group, Spread, groups, mode_rank, roles_of
from implicit_llm_report.model_groups import Model, ModelGroup, group_models
from implicit_llm_report.published import Published
from implicit_llm_report.table_text import fields, files_of, rounded, spread_fields
from implicit_llm_report.training_runs import FLOPS, LANGUAGE_MODEL, TrainingRun, loss_at

SAME_FLOPS = 0.10
PERPLEXITY, TRAINING_LOSS = "perplexity", "training loss"
CSV_METRICS = (
    "perplexity", "loss", "perplexity_within_documents", "f_evaluations_per_token", "residual", "unconverged_share",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The lines of one group of models on one test set; a run's lines stand together, its headline mode first."""

    group: ModelGroup
    data: str
    lines: tuple[Group, ...]
    training: tuple[TrainingRun, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.group.title}, {self.data}"

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({length for line in self.lines for length in line.rows["length"]})

    @property
    def train_lengths(self) -> list[int]:
        return sorted({line.train_length for line in self.lines if line.train_length})

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(self.lines)

    @cached_property
    def headlines(self) -> tuple[Group, ...]:
        """One line a model, in the mode that stands for it."""
        return tuple(line for line in self.lines if line.is_headline)

    @property
    def explicit(self) -> tuple[Group, ...]:
        return tuple(line for line in self.headlines if not line.is_implicit)

    def name(self, line: Group) -> str:
        return self.group.name_of(line, self.lines)

    def relative_flops(self, line: Group) -> float | None:
        """Training FLOPs over those of the explicit run that took the fewest."""
        flops, explicit = flops_of(line), [found for other in self.explicit if (found := flops_of(other))]
        return flops / min(explicit) if flops and explicit else None

    def first_tokens(self, cell: Group) -> int | None:
        """How many tokens a number was measured on, where others at this length saw more: they are not comparable."""
        others = (line.rows[line.rows["length"] == cell.length]["num_tokens"] for line in self.lines)
        most = max(number or 0 for numbers in others for number in numbers)
        return cell.num_tokens if cell.num_tokens and cell.num_tokens < most else None

    @cached_property
    def equal_flops(self) -> list[EqualFlops]:
        """Each implicit line against the explicit lines of equal FLOPs, or else against the one that comes nearest."""
        explicit, found = [line for line in self.explicit if flops_of(line)], []
        for line in self.headlines:
            if not line.is_implicit or not flops_of(line) or not explicit:
                continue
            equal = [other for other in explicit if is_close(flops_of(line), flops_of(other), SAME_FLOPS)]
            nearest = min(explicit, key=lambda other: abs((flops_of(other) or 0.0) - (flops_of(line) or 0.0)))
            on_the_way = None if equal else _interpolated(line, nearest, self.training)
            found += [_held_out(line, other) for other in equal] + ([on_the_way] if on_the_way else [])
        return found


@dataclass(frozen=True)
class PerplexityResults:
    """All perplexities; groups are made with the training runs, so that both kinds of figures have the same."""

    rows: pd.DataFrame
    training: tuple[TrainingRun, ...] = ()

    @cached_property
    def groups(self) -> tuple[ModelGroup, ...]:
        """Of the runs evaluated here and of all language models trained."""
        return group_models([*measured_models(self.rows), *trained_models(self.training)])

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        found = []
        for group in self.groups:
            mine = groups(self.rows[self.rows["run"].isin(group.runs)], ("data",), order=lambda test: test.data)
            for test in mine:
                lines = groups(test.rows, ("run", "phase", "mode"), order=_line_order)
                found.append(Comparison(group, test.data, tuple(lines), self.training))
        return tuple(found)


def measured_models(rows: pd.DataFrame) -> list[Model]:
    models = rows.drop_duplicates("run", keep="last")
    columns = (models[column] for column in ("run", "is_implicit", "model_type", "num_parameters"))
    return [Model(*values) for values in zip(*columns, strict=True)]


def trained_models(training: Sequence[TrainingRun]) -> list[Model]:
    """They come after the measured ones, whose training data is not known: the later one of a run counts."""
    return [
        Model(run.run, run.is_implicit, run.model_type, run.num_parameters, run.data)
        for run in training
        if run.task == LANGUAGE_MODEL
    ]


def _line_order(line: Group) -> tuple:
    """Implicit runs first, a run's phases by the training they cost, its modes with the headline first."""
    cost = (line.train_flops or 0.0, line.phase or "")
    return (not line.is_implicit, line.run, cost, not line.is_headline, mode_rank(line.mode))


@dataclass(frozen=True)
class EqualFlops:
    """One implicit and one explicit line of a comparison; `flops` were spent on each, `length` for perplexity."""

    metric: str
    implicit: Group
    explicit: Group
    flops: float
    length: int | None
    of_implicit: Spread
    of_explicit: Spread

    @property
    def sides(self) -> list[tuple[Group, Group, Spread]]:
        """Each line, the one that it is compared with, and its numbers."""
        first = (self.implicit, self.explicit, self.of_implicit)
        return [first, (self.explicit, self.implicit, self.of_explicit)]


def flops_of(line: Group) -> float | None:
    """Training FLOPs, mean over seeds."""
    return _mean_of_seeds(line, "train_flops")


def tokens_of(line: Group) -> float | None:
    """Training tokens, mean over seeds."""
    return _mean_of_seeds(line, "train_tokens")


def _mean_of_seeds(line: Group, column: str) -> float | None:
    values = line.rows.drop_duplicates("seed")[column].dropna().tolist()
    return sum(values) / len(values) if values else None


def is_close(first: float | None, second: float | None, tolerance: float) -> bool:
    """Whether two positive numbers differ by at most the share `tolerance` of the larger one."""
    return bool(first and second and abs(first - second) <= tolerance * max(first, second))


def trained_length(line: Group) -> int | None:
    """The training length where it was evaluated, else the shortest length that was."""
    lengths = set(line.rows["length"])
    return line.train_length if line.train_length in lengths else min(lengths, default=None)


def perplexity_at(line: Group, length: float | None) -> Spread:
    cell = line.cells("length").get(length)
    return Spread(()) if cell is None else cell.spread(PERPLEXITY)


def _held_out(implicit: Group, explicit: Group) -> EqualFlops:
    length = trained_length(implicit)
    spreads = [perplexity_at(line, length) for line in (implicit, explicit)]
    flops = ((flops_of(implicit) or 0.0) + (flops_of(explicit) or 0.0)) / 2
    return EqualFlops(PERPLEXITY, implicit, explicit, flops, length, *spreads)


def _interpolated(implicit: Group, explicit: Group, training: Sequence[TrainingRun]) -> EqualFlops | None:
    """None when the journals carry no FLOPs."""
    curves = [list(_curves(line, training)) for line in (implicit, explicit)]
    ends = [curve.index[-1] for of_line in curves for curve in of_line]
    if not all(curves) or not ends:
        return None
    flops = float(min(ends))
    spreads = [Spread.of(loss_at(curve, flops) for curve in of_line) for of_line in curves]
    return EqualFlops(TRAINING_LOSS, implicit, explicit, flops, None, *spreads)


def _curves(line: Group, training: Sequence[TrainingRun]) -> Iterator[pd.Series]:
    for run in training:
        phase = next((phase for phase in run.phases if phase.name == line.phase), None)
        if run.run == line.run and phase is not None:
            curve = run.loss_along(phase, FLOPS)
            if len(curve):
                yield curve


def share_bounded(line: Group, training: Sequence[TrainingRun]) -> float | None:
    """The share of a branch's steps before its last phase began; None where the phase starts from none."""
    for run in training:
        for phase in run.phases:
            is_its = (run.run, phase.name) == (line.run, line.phase)
            if is_its and run.before(phase) is not None and phase.end_step:
                return phase.start_step / phase.end_step
    return None


def branches_of(comparison: Comparison, run: str) -> dict[float, Group]:
    """The lines of a run's free phases by their share, the smallest first."""
    mine = [line for line in comparison.headlines if line.run == run and line.is_implicit]
    shares = {share: line for line in mine if (share := share_bounded(line, comparison.training)) is not None}
    return dict(sorted(shares.items()))


def perplexity_files(comparisons: Sequence[Comparison], published: Published) -> dict[str, str]:
    """One line a (run, phase, test set, mode, length) in the block "held-out", then the block "equal FLOPs"."""
    rows: list[tuple[str, list[dict[str, object]]]] = []
    for found in comparisons:
        cells = [(line, cell) for line in found.lines for cell in line.cells("length").values()]
        rows.append((f"{found.title}, held-out perplexity", [_csv_row(found, *cell, published) for cell in cells]))
        equal = [_equal_csv_row(found, one, *side) for one in found.equal_flops for side in one.sides]
        rows += [(f"{found.title}, at equal training FLOPs", equal)] if equal else []
    names = {"run": "Model", "phase": "Phase", "solver": "Solver", "mode": "Mode", "compared_with": "Against"}
    values = {PERPLEXITY: "perplexity", "loss": "loss"}
    return files_of(rows, names | {"length": "Length", "num_tokens": "Tokens read"}, values)


def _about(found: Comparison, line: Group, block: str, compared: str | None, length: int | None) -> dict[str, object]:
    return {
        **{"block": block, "data": found.data, "family": found.group.family},
        **fields(line, "run", "model", "phase", "solver"),
        **{"compared_with": compared, "mode": line.mode, "length": length},
    }


def _csv_row(found: Comparison, line: Group, cell: Group, published: Published) -> dict[str, object]:
    number = published.beside(cell, "perplexity")
    return {
        **_about(found, line, "held-out", None, cell.length),
        **{"num_seeds": len(cell.spread(PERPLEXITY).values), **fields(cell, "num_tokens", "num_parameters")},
        **{"train_tokens": rounded(tokens_of(line)), "train_flops": rounded(flops_of(line))},
        "relative_flops": rounded(found.relative_flops(line)),
        **spread_fields(CSV_METRICS, cell.spread),
        **{"published_perplexity": number and number.value, "published_mark": number and number.mark},
    }


def _equal_csv_row(
    found: Comparison, equal: EqualFlops, line: Group, other: Group, spread: Spread
) -> dict[str, object]:
    """The loss of such a row is the smoothed training loss; its perplexity, where there is one, is held out."""
    metric = "loss" if equal.metric == TRAINING_LOSS else PERPLEXITY
    return {
        **_about(found, line, "equal FLOPs", found.name(other), equal.length),
        **{"num_seeds": len(spread.values), "num_parameters": line.num_parameters},
        **{"train_flops": rounded(equal.flops), "relative_flops": 1.0},
        **spread_fields([metric], lambda _: spread),
    }
