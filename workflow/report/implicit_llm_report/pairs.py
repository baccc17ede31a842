"""The pairs of models that a claim compares: language models in text and on downstream tasks, CatbAbI models by task.

Every model speaks in the mode that is its headline. Language models are equal in parameters when these agree within
10 %, in tokens within 1 %, in FLOPs within 10 %. CatbAbI models are compared at equal layers and tokens: in one layer
the input injection of an implicit model weighs too much for equal parameters.

One run speaks for each side of a group (size, tokens and test set), and each is chosen by its own score, never by what
comes out of the pair. CatbAbI runs that compete (babi.py) are chosen on the validation set and judged on the
test set; without validation numbers there is no verdict. Language models have no validation set: the lowest training
loss at the end is chosen. Where that is not known nothing chooses fairly: the lowest held-out perplexity of each side
is compared, and the evidence says so; on downstream tasks every rival is compared. The branches of a curriculum compete
like runs.

The number is formed for every pair of a seed of the first and a seed of the second (of the same seed, where both are
phases of one run and so share its start), and the claim holds when every pair says so: with overlapping seeds it fails,
and with one seed each there is no more than one pair to go by. Of several groups the worst decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from implicit_llm_report.babi import SAME_TOKENS, BabiResults, Choice, fields_of
from implicit_llm_report.claims import Found
from implicit_llm_report.downstream import Block, DownstreamTable, Row
from implicit_llm_report.frame import Group, Spread
from implicit_llm_report.measures import PairMeasure
from implicit_llm_report.perplexity import (
    SAME_FLOPS,
    Comparison,
    PerplexityResults,
    flops_of,
    is_close,
    perplexity_at,
    tokens_of,
)
from implicit_llm_report.section import SectionInputs
from implicit_llm_report.training_runs import Solver, TrainingRun, end_loss_of

SAME_PARAMETERS = 0.10


def find_pairs(measure: PairMeasure, given: SectionInputs) -> Iterator[Found]:
    """Of every group of models with both sides."""
    if measure.metric == "downstream":
        yield from downstream_pairs(measure, given)
    elif measure.metric == "perplexity":
        yield from perplexity_pairs(measure, given.perplexities)
    else:
        yield from babi_pairs(measure, given.babi)


def perplexity_pairs(measure: PairMeasure, results: PerplexityResults) -> Iterator[Found]:
    for comparison in results.comparisons:
        if measure.family not in (None, comparison.group.family):
            continue
        kinds = {id(line): kinds_of(line, comparison.headlines) for line in comparison.headlines}
        firsts = [line for line in comparison.headlines if measure.first in kinds[id(line)]]
        seconds = [line for line in comparison.headlines if measure.second in kinds[id(line)]]
        partners = {id(line): [other for other in seconds if _is_equal(measure, line, other)] for line in firsts}
        for rivals in _equal_lines([line for line in firsts if partners[id(line)]]):
            length = length_tested(rivals[0], measure.length_factor)
            first = choose_line(rivals, length, comparison.training)
            second = choose_line(partners[id(first.line)], length, comparison.training)
            yield from _perplexity_pair(measure, comparison, first, second)


def _equal_lines(lines: Iterable[Group]) -> list[list[Group]]:
    """The lines by size, tokens and training length."""
    found: list[list[Group]] = []
    for line in lines:
        length = line.train_length
        same = (group for group in found if group[0].train_length == length)
        group = next((group for group in same if _is_equal_training(group[0], line)), None)
        if group is None:
            found.append([line])
        else:
            group.append(line)
    return found


def kinds_of(line: Group, others: Iterable[Group]) -> set[str]:
    """The names under which a claim means a line: explicit; or implicit, and bounded or free where its run has both."""
    if not line.is_implicit:
        return {"explicit"}
    iterations = {iterations_of(other.solver) for other in others if other.run == line.run}
    if len(iterations) < 2:
        return {"implicit"}
    return {"implicit", "bounded" if iterations_of(line.solver) == min(iterations) else "free"}


def _is_equal(measure: PairMeasure, first: Group, second: Group) -> bool:
    """Whether a claim compares the two: evaluated at its length, of equal size and equal tokens or FLOPs."""
    length = length_tested(first, measure.length_factor)
    if not {length} & set(first.rows["length"]) & set(second.rows["length"]):
        return False
    if measure.second == "bounded" and first.run != second.run:
        return False
    if measure.equal == "flops":
        return _is_equal_size(first, second) and is_close(flops_of(first), flops_of(second), SAME_FLOPS)
    return _is_equal_training(first, second)


def _is_equal_training(first: Group, second: Group) -> bool:
    return _is_equal_size(first, second) and is_close(tokens_of(first), tokens_of(second), SAME_TOKENS)


def _is_equal_size(first: Group, second: Group) -> bool:
    return is_close(first.num_parameters, second.num_parameters, SAME_PARAMETERS)


def _perplexity_pair(
    measure: PairMeasure, comparison: Comparison, chosen: LineChoice, other: LineChoice
) -> Iterator[Found]:
    first, second = chosen.line, other.line
    length = length_tested(first, measure.length_factor)
    cells = [line.cells("length")[length] for line in (first, second)]
    spreads = [cell.spread("perplexity") for cell in cells]
    is_one_run = first.run == second.run
    ours, others = (cell.by_seed("perplexity") for cell in cells)
    ratios = (
        mine / its
        for seed, mine in ours.items()
        for other, its in others.items()
        if mine and its and (seed == other or not is_one_run)
    )
    spread = Spread(tuple(ratios), spreads[0].num_missing + spreads[1].num_missing)
    names = [f"{line.run} {line.phase_label or ''}".strip() for line in (first, second)]
    yield Found(
        spread,
        text=f"{names[0]} ({first.mode}){chosen.words} over {names[1]} ({second.mode}){other.words}, "
        f"{comparison.data}, length {length:g}, " + seeds_text(spreads),
        run=first.run,
        data=comparison.data,
        modes=(first.mode, second.mode),
        num_seeds=min(len(spread.values) for spread in spreads),
        roles=(*cells[0].roles, *cells[1].roles),
    )


def babi_pairs(measure: PairMeasure, results: BabiResults) -> Iterator[Found]:
    for data in results.test_sets:
        for field in fields_of(results, data):
            is_meant = measure.num_layers in (None, field.num_layers) and measure.family in (None, field.family)
            if is_meant and field.implicit is not None and field.explicit is not None:
                yield _babi_pair(data, field.implicit, field.explicit)


def _babi_pair(data: str, implicit: Choice, explicit: Choice) -> Found:
    if implicit.chosen is None or explicit.chosen is None:
        return _unchosen_pair(data, implicit, explicit)
    first, second = implicit.chosen, explicit.chosen
    ours, others = ([detail.get("accuracy_by_task") or {} for detail in cell.details] for cell in (first, second))
    shares = [_share_better(mine, other) for mine in ours for other in others]
    text = (
        f"{first.name} ({first.mode}){implicit.words} against {second.name} ({second.mode}){explicit.words}, {data}, "
    )
    return Found(
        Spread.of(shares),
        text=text + seeds_text([first.spread("accuracy"), second.spread("accuracy")]),
        run=first.run,
        data=data,
        modes=(first.mode, second.mode),
        num_seeds=min(first.num_records, second.num_records),
        roles=(*first.roles, *second.roles),
    )


def _unchosen_pair(data: str, *choices: Choice) -> Found:
    """Without a number: the test set must not choose."""
    first, second = (choice.rivals[0] for choice in choices)
    counts = " and ".join(str(len(choice.rivals)) for choice in choices)
    return Found(
        Spread((), num_missing=1),
        text=f"{counts} runs, {data}: no accuracy on the validation set chooses among them",
        run=first.run,
        data=data,
        modes=(first.mode, second.mode),
        num_seeds=0,
        roles=tuple(role for choice in choices for cell in choice.rivals for role in cell.roles),
    )


def _share_better(first: Mapping[str, float], second: Mapping[str, float]) -> float | None:
    """Share of the tasks that both answered on which the first is more accurate; a tie is not more accurate."""
    tasks = first.keys() & second.keys()
    return sum(first[task] > second[task] for task in tasks) / len(tasks) if tasks else None


def downstream_pairs(measure: PairMeasure, given: SectionInputs) -> Iterator[Found]:
    """A pair for each group of models, size and number of training tokens with both sides."""
    for table in given.downstream.tables:
        for block in table.blocks:
            if measure.family in (None, block.group.family) and _is_asked(measure, table):
                yield from _of_block(measure, table, block, given)


def _is_asked(measure: PairMeasure, table: DownstreamTable) -> bool:
    if measure.column is None:
        return bool(table.suite.averages)
    return measure.column in [column.label for column in table.suite.columns]


def _of_block(measure: PairMeasure, table: DownstreamTable, block: Block, given: SectionInputs) -> Iterator[Found]:
    rows = [row for row in block.rows if row.group.is_headline and row.group.source is None]
    kinds = [kinds_of(row.group, [other.group for other in rows]) for row in rows]
    firsts, seconds = (
        [row for row, mine in zip(rows, kinds, strict=True) if kind in mine] for kind in (measure.first, measure.second)
    )
    done: list[Row] = []
    for row in firsts:
        rivals = [other for other in firsts if _is_equal_training(row.group, other.group)]
        partners = [
            other
            for other in seconds
            if _is_equal_training(row.group, other.group)
            and (measure.second != "bounded" or row.group.run == other.group.run)
        ]
        if row in done or not partners:
            continue
        done += rivals
        for first in _chosen_rows(rivals, given):
            for second in _chosen_rows(partners, given):
                yield _downstream_pair(measure, table, first, second)


def _chosen_rows(rivals: Sequence[Row], given: SectionInputs) -> Sequence[Row]:
    best = _of_lowest_loss([row.group for row in rivals], given.inputs.training)
    return rivals if best is None else [rivals[best]]


def _of_lowest_loss(rivals: Sequence[Group], training: Sequence[TrainingRun]) -> int | None:
    """The place of the one with the lowest training loss at the end; None where one of them has none."""
    losses = [end_loss_of(line.run, line.phase, training) for line in rivals]
    known = [loss for loss in losses if loss is not None]
    return known.index(min(known)) if known and len(known) == len(losses) else None


def _downstream_pair(measure: PairMeasure, table: DownstreamTable, first: Row, second: Row) -> Found:
    asked = measure.column or table.suite.averages[0].label
    column = next(column for column in table.suite.all_columns if column.label == asked)
    spreads, sign = [row.spread(column) or Spread((), 1) for row in (first, second)], -1 if column.is_low_better else 1
    # Phases of one run share its start: seed against seed, where both have all of theirs.
    is_one_run = first.group.run == second.group.run and not any(spread.num_missing for spread in spreads)
    mine, other = (spread.values for spread in spreads)
    pairs = zip(mine, other, strict=False) if is_one_run else ((a, b) for a in mine for b in other)
    spread = Spread(tuple(sign * (a - b) for a, b in pairs), spreads[0].num_missing + spreads[1].num_missing)
    return Found(
        spread,
        text=f"{_row_name(first)} against {_row_name(second)}, {asked}, {seeds_text(spreads)}",
        run=first.group.run,
        data=table.suite.name,
        modes=(first.group.mode, second.group.mode),
        num_seeds=min(len(spread.values) for spread in spreads),
        roles=(*first.group.roles, *second.group.roles),
    )


def _row_name(row: Row) -> str:
    return f"{row.group.run} {row.group.phase_label or ''}".strip() + f" ({row.group.mode})"


def iterations_of(solver: Solver | None) -> int:
    """The most solver iterations of a phase, 0 where it has none or they are not known."""
    return 0 if solver is None else solver.iterations


def seeds_text(spreads: list[Spread]) -> str:
    """ "2 and 3 seeds, 1 missing"."""
    counts = [len(spread.values) for spread in spreads]
    words = f"{counts[0]} and {counts[1]} seeds"
    missing = sum(spread.num_missing for spread in spreads)
    return words + (f", {missing} missing" if missing else "") + (", no spread" if max(counts) <= 1 else "")


@dataclass(frozen=True)
class LineChoice:
    """A line that speaks for its rivals; `words` says how it was chosen, empty where it is the only one."""

    line: Group
    words: str = ""


def choose_line(rivals: Sequence[Group], length: float, training: Sequence[TrainingRun]) -> LineChoice:
    """The line that speaks for `rivals`, at least one; `length` is that of the test rows, in tokens."""
    if len(rivals) == 1:
        return LineChoice(rivals[0])
    chosen = _of_lowest_loss(rivals, training)
    if chosen is not None:
        return LineChoice(rivals[chosen], f" [chosen of {len(rivals)} by training loss at the end]")
    best = min(rivals, key=lambda line: _own_score(line, length))
    words = f" [of {len(rivals)} the one of lowest perplexity on this very text: no training losses choose among them]"
    return LineChoice(best, words)


def length_tested(line: Group, length_factor: float) -> float:
    """The length of the test rows that a claim is about, in tokens."""
    return (line.train_length or 0) * length_factor


def _own_score(line: Group, length: float) -> float:
    mean = perplexity_at(line, length).mean
    return float("inf") if mean is None else mean
