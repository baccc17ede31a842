"""Judging claims that compare two kinds of models: language models by perplexity, CatbAbI models task by task.

Every model speaks in the mode that is its headline. Language models are equal in parameters when these agree within
10 %, in tokens within 1 %, in FLOPs within 10 %. CatbAbI models are compared at equal layers and tokens: in one layer
the input injection of an implicit model weighs too much for equal parameters.

The number is formed for every pair of a seed of the first and a seed of the second (of the same seed, where both are
phases of one run and so share its start), and the claim holds when every pair says so: with overlapping seeds it fails,
and with one seed each there is no more than one pair to go by. Where several lines are `first` (branches of a
curriculum) the best of them speaks, by its mean; where several sizes or test sets were measured the worst of them
decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from implicit_llm.report.babi_results import BabiCell, BabiPoint, BabiResults
from implicit_llm.report.claims import FAILS, HOLDS, MISSING, NOT_RUN, Claim, Evidence, Judgement, Verdict
from implicit_llm.report.equal_flops import SAME_FLOPS, flops_of, is_close, tokens_of
from implicit_llm.report.pair_measure import PairMeasure
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityResults
from implicit_llm.report.results import Spread

SAME_PARAMETERS, SAME_TOKENS = 0.10, 0.01


@dataclass(frozen=True)
class Pair:
    """The number for every pair of seeds, and what it comes from; `group` tells sizes and test sets apart."""

    group: object
    spread: Spread
    evidence: Evidence


def judge_pair(claim: Claim, perplexities: PerplexityResults, babi: BabiResults, scale: str) -> Judgement:
    """The verdict on a claim with `compare`, see the head of this file."""
    measure = claim.compare
    if scale not in claim.scales or measure is None:
        return Judgement(claim, NOT_RUN, Spread(()))
    is_perplexity = measure.metric == "perplexity"
    pairs = _perplexity_pairs(measure, perplexities) if is_perplexity else _babi_pairs(measure, babi)
    best = _best_by_group(pairs, lower_is_better=is_perplexity)
    if not best:
        return Judgement(claim, NOT_RUN, Spread(()))
    sign = 1 if is_perplexity else -1
    worst = max(best, key=lambda pair: float("inf") if pair.spread.mean is None else sign * pair.spread.mean)
    if worst.spread.mean is None or worst.spread.num_missing:
        return Judgement(claim, MISSING, worst.spread, worst.evidence)
    verdict: Verdict = HOLDS if all(_says_so(measure, pair.spread) for pair in best) else FAILS
    if verdict == FAILS and _says_so(measure, worst.spread):  # show the pair that fails by its seeds
        worst = next(pair for pair in best if not _says_so(measure, pair.spread))
    return Judgement(claim, verdict, worst.spread, worst.evidence)


def _says_so(measure: PairMeasure, spread: Spread) -> bool:
    if measure.metric == "perplexity":
        return spread.high is not None and spread.high < 1
    return spread.low is not None and spread.low > 0.5


def _best_by_group(pairs: Iterable[Pair], *, lower_is_better: bool) -> list[Pair]:
    """The best pair of each group; pairs without a number count only where there is no other."""
    best: dict[object, Pair] = {}
    for pair in pairs:
        other = best.get(pair.group)
        mean, before = pair.spread.mean, other.spread.mean if other else None
        if other is None or (mean is not None and (before is None or (mean < before) == lower_is_better)):
            best[pair.group] = pair
    return list(best.values())


def _perplexity_pairs(measure: PairMeasure, results: PerplexityResults) -> Iterator[Pair]:
    for comparison in results.comparisons:
        if measure.family not in (None, comparison.group.family):
            continue
        kinds = {id(line): kinds_of(line, comparison) for line in comparison.headlines}
        firsts = [line for line in comparison.headlines if measure.first in kinds[id(line)]]
        seconds = [line for line in comparison.headlines if measure.second in kinds[id(line)]]
        for first in firsts:
            for second in seconds:
                if _is_equal(measure, first, second):
                    yield from _perplexity_pair(measure, comparison, first, second)


def kinds_of(line: Line, comparison: Comparison) -> set[str]:
    """The names under which a claim means a line: explicit; or implicit, and bounded or free where a run has both."""
    if not line.variant.is_implicit:
        return {"explicit"}
    labels = {
        other.variant.phase_label: _iterations(other.variant.phase_label)
        for other in comparison.headlines
        if other.variant.run == line.variant.run
    }
    if len(set(labels.values())) < 2:
        return {"implicit"}
    is_bounded = labels[line.variant.phase_label] == min(labels.values())
    return {"implicit", "bounded" if is_bounded else "free"}


def _iterations(label: str | None) -> int:
    """The solver iterations in a short form: 24 in "(24+4)"."""
    digits = "".join(letter if letter.isdigit() else " " for letter in label or "").split()
    return int(digits[0]) if digits else 0


def _is_equal(measure: PairMeasure, first: Line, second: Line) -> bool:
    parameters = (first.first.num_parameters, second.first.num_parameters)
    if not is_close(*parameters, SAME_PARAMETERS):
        return False
    if measure.second == "bounded" and first.variant.run != second.variant.run:
        return False
    if measure.equal == "flops":
        return is_close(flops_of(first), flops_of(second), SAME_FLOPS)
    return is_close(tokens_of(first), tokens_of(second), SAME_TOKENS)


def _perplexity_pair(measure: PairMeasure, comparison: Comparison, first: Line, second: Line) -> Iterator[Pair]:
    length = (first.first.train_length or 0) * measure.length_factor
    cells = [next((cell for cell in line.cells if cell.first.length == length), None) for line in (first, second)]
    if cells[0] is None or cells[1] is None:
        return
    spreads = [cell.spread("perplexity") for cell in cells if cell is not None]
    is_one_run = first.variant.run == second.variant.run
    ratios = (
        mine.perplexity / other.perplexity
        for mine in cells[0].points
        for other in cells[1].points
        if mine.perplexity and other.perplexity and (mine.seed == other.seed or not is_one_run)
    )
    spread = Spread(tuple(ratios), spreads[0].num_missing + spreads[1].num_missing)
    names = [f"{line.variant.run} {line.variant.phase_label or ''}".strip() for line in (first, second)]
    yield Pair(
        (comparison.group.title, comparison.data),
        spread,
        Evidence(
            text=f"{names[0]} ({first.mode}) over {names[1]} ({second.mode}), {comparison.data}, length {length:g}, "
            + _seeds_text(spreads),
            run=first.variant.run,
            data=comparison.data,
            modes=(first.mode, second.mode),
            num_seeds=min(len(spread.values) for spread in spreads),
            roles=(*cells[0].roles, *cells[1].roles),
        ),
    )


def _babi_pairs(measure: PairMeasure, results: BabiResults) -> Iterator[Pair]:
    for data in results.data_sets:
        cells = [cell for cell in results.of(data, headline_only=True) if _is_meant(measure, cell)]
        for first in (cell for cell in cells if cell.first.is_implicit):
            for second in (cell for cell in cells if not cell.first.is_implicit):
                trained = is_close(first.first.train_tokens, second.first.train_tokens, SAME_TOKENS)
                if trained and first.first.num_layers == second.first.num_layers:
                    yield _babi_pair(data, results, first, second)


def _is_meant(measure: PairMeasure, cell: BabiCell) -> bool:
    point = cell.first
    return measure.num_layers in (None, point.num_layers) and measure.family in (None, point.family)


def _babi_pair(data: str, results: BabiResults, first: BabiCell, second: BabiCell) -> Pair:
    shares = [_share_better(mine, other) for mine in first.points for other in second.points]
    text = f"{results.name(first)} ({first.first.mode}) against {results.name(second)} ({second.first.mode}), {data}, "
    evidence = Evidence(
        text=text + _seeds_text([first.spread("accuracy"), second.spread("accuracy")]),
        run=first.first.run,
        data=data,
        modes=(first.first.mode, second.first.mode),
        num_seeds=min(len(first.points), len(second.points)),
        roles=(*first.roles, *second.roles),
    )
    return Pair((data, first.first.num_layers, first.first.family), Spread.of(shares), evidence)


def _share_better(first: BabiPoint, second: BabiPoint) -> float | None:
    """Share of the tasks that both answered on which the first is more accurate; a tie is not more accurate."""
    tasks = (first.accuracy_by_task or {}).keys() & (second.accuracy_by_task or {}).keys()
    if not tasks:
        return None
    better = [(first.of_task(int(task)) or 0.0) > (second.of_task(int(task)) or 0.0) for task in tasks]
    return sum(better) / len(better)


def _seeds_text(spreads: list[Spread]) -> str:
    counts = [len(spread.values) for spread in spreads]
    words = f"{counts[0]} and {counts[1]} seeds"
    missing = sum(spread.num_missing for spread in spreads)
    return words + (f", {missing} missing" if missing else "") + (", no spread" if max(counts) <= 1 else "")
