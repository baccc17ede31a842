"""Language models of equal parameters and training tokens on downstream tasks: by how much the first is better.

The choice among rivals is that of perplexities: the lowest training loss at the end speaks. Where it is not known for
all of them there is no fair choice, and every rival is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from implicit_llm.report.babi_choice import SAME_TOKENS
from implicit_llm.report.downstream_results import Block, DownstreamTable, Row, downstream_tables, groups_of, points_of
from implicit_llm.report.equal_flops import is_close
from implicit_llm.report.evidence import Evidence
from implicit_llm.report.line_choice import end_loss_of
from implicit_llm.report.pair_measure import Pair, PairMeasure, phase_kinds, seeds_text
from implicit_llm.report.results import Spread
from implicit_llm.report.section import SectionInputs

SAME_PARAMETERS = 0.10


def downstream_pairs(measure: PairMeasure, given: SectionInputs) -> Iterator[Pair]:
    """A pair for each group of models, size and number of training tokens with both sides."""
    points = [point for point in points_of(given.inputs.records.get("lm_eval", ())) if point.source is None]
    groups = groups_of(points, given.inputs.training)
    tables = downstream_tables(points, groups, given.suites, given.published, given.config.headline_mode)
    for table in tables:
        for block in table.blocks:
            if measure.family in (None, block.group.family) and _is_asked(measure, table):
                yield from _pairs(measure, table, block, given)


def _is_asked(measure: PairMeasure, table: DownstreamTable) -> bool:
    if measure.column is None:
        return bool(table.suite.averages)
    return measure.column in [column.label for column in table.suite.columns]


def _pairs(measure: PairMeasure, table: DownstreamTable, block: Block, given: SectionInputs) -> Iterator[Pair]:
    rows = [row for row in block.rows if row.is_headline]
    firsts, seconds = ([row for row in rows if kind in kinds_of(row, rows)] for kind in (measure.first, measure.second))
    done: list[Row] = []
    for row in firsts:
        rivals = [other for other in firsts if _is_equal(row, other)]
        partners = [other for other in seconds if _is_equal(row, other) and _is_partner(measure, row, other)]
        if row in done or not partners:
            continue
        done += rivals
        for first in _chosen(rivals, given):
            for second in _chosen(partners, given):
                yield _pair(measure, table, first, second)


def kinds_of(row: Row, rows: Sequence[Row]) -> set[str]:
    """The names under which a claim means a row: explicit; or implicit, and bounded or free where a run has both."""
    if not row.first.is_implicit:
        return {"explicit"}
    return phase_kinds(row.first.solver, {r.first.solver for r in rows if r.first.run == row.first.run})


def _is_partner(measure: PairMeasure, first: Row, second: Row) -> bool:
    return measure.second != "bounded" or first.first.run == second.first.run


def _is_equal(first: Row, second: Row) -> bool:
    mine, other = first.first, second.first
    has_equal_size = is_close(mine.num_parameters, other.num_parameters, SAME_PARAMETERS)
    return has_equal_size and is_close(mine.train_tokens, other.train_tokens, SAME_TOKENS)


def _chosen(rivals: Sequence[Row], given: SectionInputs) -> Sequence[Row]:
    losses = [end_loss_of(row.first.run, row.first.phase, given.inputs.training) for row in rivals]
    known = [loss for loss in losses if loss is not None]
    if len(rivals) == 1 or len(known) < len(rivals):
        return rivals
    return [rivals[known.index(min(known))]]


def _pair(measure: PairMeasure, table: DownstreamTable, first: Row, second: Row) -> Pair:
    spreads, sign, asked = [Spread(()), Spread(())], 1, table.suite.title.lower()
    if measure.column is None:
        average = table.suite.averages[0]
        spreads = [row.average(average, table.suite) or Spread((), 1) for row in (first, second)]
    else:
        column = next(column for column in table.suite.columns if column.label == measure.column)
        spreads = [row.spread(column) or Spread((), 1) for row in (first, second)]
        sign, asked = -1 if column.is_low_better else 1, column.label
    # Phases of one run share its start: seed against seed, where both have all of theirs.
    is_one_run = first.first.run == second.first.run and not any(spread.num_missing for spread in spreads)
    mine, other = (spread.values for spread in spreads)
    pairs = zip(mine, other, strict=False) if is_one_run else ((a, b) for a in mine for b in other)
    spread = Spread(tuple(sign * (a - b) for a, b in pairs), spreads[0].num_missing + spreads[1].num_missing)
    evidence = Evidence(
        text=f"{_name(first)} against {_name(second)}, {asked}, {seeds_text(spreads)}",
        run=first.first.run,
        data=table.suite.name,
        modes=(first.first.mode, second.first.mode),
        num_seeds=min(len(spread.values) for spread in spreads),
        roles=(*first.roles, *second.roles),
    )
    return Pair(spread, evidence)


def _name(row: Row) -> str:
    return f"{row.first.run} {row.first.phase_label or ''}".strip() + f" ({row.first.mode})"
