"""Judging claims that compare two kinds of models: language models by perplexity, CatbAbI models task by task; and
language models on downstream tasks, whose pairs downstream_pairs.py finds.

Every model speaks in the mode that is its headline. Language models are equal in parameters when these agree within
10 %, in tokens within 1 %, in FLOPs within 10 %. CatbAbI models are compared at equal layers and tokens: in one layer
the input injection of an implicit model weighs too much for equal parameters.

One run speaks for each side of a group (size, tokens and test set), and each is chosen by its own score, never by what
comes out of the pair. CatbAbI runs that compete (babi_choice.py) are chosen on the validation set and judged on the
test set; without validation numbers there is no verdict. Language models have no validation set: the lowest training
loss at the end is chosen. Where that is not known nothing chooses fairly: the lowest held-out perplexity of each side
is compared, and the evidence says so. The branches of a curriculum compete like runs.

The number is formed for every pair of a seed of the first and a seed of the second (of the same seed, where both are
phases of one run and so share its start), and the claim holds when every pair says so: with overlapping seeds it fails,
and with one seed each there is no more than one pair to go by. Of several groups the worst decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from implicit_llm.report.babi_choice import SAME_TOKENS, Choice, fields_of
from implicit_llm.report.babi_results import BabiPoint, BabiResults
from implicit_llm.report.claims import FAILS, HOLDS, MISSING, NOT_RUN, Claim, Judgement, Verdict
from implicit_llm.report.equal_flops import SAME_FLOPS, flops_of, is_close, tokens_of
from implicit_llm.report.evidence import Evidence
from implicit_llm.report.line_choice import LineChoice, choose_line, length_tested
from implicit_llm.report.pair_measure import Pair, PairMeasure, phase_kinds, seeds_text
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityResults
from implicit_llm.report.results import Spread

SAME_PARAMETERS = 0.10


def judge_pair(claim: Claim, perplexities: PerplexityResults, babi: BabiResults, scale: str) -> Judgement:
    """The verdict on a claim about perplexity or CatbAbI, see the head of this file."""
    measure = claim.compare
    if measure is None:
        return Judgement(claim, NOT_RUN, Spread(()))
    is_perplexity = measure.metric == "perplexity"
    return judge_pairs(
        claim, _perplexity_pairs(measure, perplexities) if is_perplexity else _babi_pairs(measure, babi), scale
    )


def judge_pairs(claim: Claim, found: Iterable[Pair], scale: str) -> Judgement:
    """The verdict on a claim with `compare` by the pairs that it speaks of."""
    measure = claim.compare
    pairs = list(found) if scale in claim.scales else []
    if not pairs or measure is None:
        return Judgement(claim, NOT_RUN, Spread(()))
    sign = 1 if measure.metric == "perplexity" else -1
    worst = max(pairs, key=lambda pair: float("inf") if pair.spread.mean is None else sign * pair.spread.mean)
    if worst.spread.mean is None or worst.spread.num_missing:
        return Judgement(claim, MISSING, worst.spread, worst.evidence)
    verdict: Verdict = HOLDS if all(_says_so(measure, pair.spread) for pair in pairs) else FAILS
    if verdict == FAILS and _says_so(measure, worst.spread):  # show the pair that fails by its seeds
        worst = next(pair for pair in pairs if not _says_so(measure, pair.spread))
    return Judgement(claim, verdict, worst.spread, worst.evidence)


def _says_so(measure: PairMeasure, spread: Spread) -> bool:
    if measure.metric == "perplexity":
        return spread.high is not None and spread.high < 1
    return spread.low is not None and spread.low > measure.threshold


def _perplexity_pairs(measure: PairMeasure, results: PerplexityResults) -> Iterator[Pair]:
    for comparison in results.comparisons:
        if measure.family not in (None, comparison.group.family):
            continue
        kinds = {id(line): kinds_of(line, comparison) for line in comparison.headlines}
        firsts = [line for line in comparison.headlines if measure.first in kinds[id(line)]]
        seconds = [line for line in comparison.headlines if measure.second in kinds[id(line)]]
        partners = {id(line): [other for other in seconds if _is_equal(measure, line, other)] for line in firsts}
        for rivals in _equal_lines([line for line in firsts if partners[id(line)]]):
            length = length_tested(rivals[0], measure.length_factor)
            first = choose_line(rivals, length, results.training)
            second = choose_line(partners[id(first.line)], length, results.training)
            yield from _perplexity_pair(measure, comparison, first, second)


def _equal_lines(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines by size, tokens and training length."""
    found: list[list[Line]] = []
    for line in lines:
        length = line.first.train_length
        same = (group for group in found if group[0].first.train_length == length)
        group = next((group for group in same if _is_equal_training(group[0], line)), None)
        if group is None:
            found.append([line])
        else:
            group.append(line)
    return found


def kinds_of(line: Line, comparison: Comparison) -> set[str]:
    """The names under which a claim means a line: explicit; or implicit, and bounded or free where a run has both."""
    if not line.variant.is_implicit:
        return {"explicit"}
    of_run = {other.variant.solver for other in comparison.headlines if other.variant.run == line.variant.run}
    return phase_kinds(line.variant.solver, of_run)


def _is_equal(measure: PairMeasure, first: Line, second: Line) -> bool:
    """Whether a claim compares the two: evaluated at its length, of equal size and equal tokens or FLOPs."""
    length = length_tested(first, measure.length_factor)
    if first.at(length) is None or second.at(length) is None:
        return False
    if measure.second == "bounded" and first.variant.run != second.variant.run:
        return False
    if measure.equal == "flops":
        return _is_equal_size(first, second) and is_close(flops_of(first), flops_of(second), SAME_FLOPS)
    return _is_equal_training(first, second)


def _is_equal_training(first: Line, second: Line) -> bool:
    return _is_equal_size(first, second) and is_close(tokens_of(first), tokens_of(second), SAME_TOKENS)


def _is_equal_size(first: Line, second: Line) -> bool:
    return is_close(first.first.num_parameters, second.first.num_parameters, SAME_PARAMETERS)


def _perplexity_pair(
    measure: PairMeasure, comparison: Comparison, chosen: LineChoice, other: LineChoice
) -> Iterator[Pair]:
    first, second = chosen.line, other.line
    length = length_tested(first, measure.length_factor)
    cells = [first.at(length), second.at(length)]
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
        spread,
        Evidence(
            text=f"{names[0]} ({first.mode}){chosen.words} over {names[1]} ({second.mode}){other.words}, "
            f"{comparison.data}, length {length:g}, " + seeds_text(spreads),
            run=first.variant.run,
            data=comparison.data,
            modes=(first.mode, second.mode),
            num_seeds=min(len(spread.values) for spread in spreads),
            roles=(*cells[0].roles, *cells[1].roles),
        ),
    )


def _babi_pairs(measure: PairMeasure, results: BabiResults) -> Iterator[Pair]:
    for data in results.test_sets:
        for field in fields_of(results, data):
            is_meant = measure.num_layers in (None, field.num_layers) and measure.family in (None, field.family)
            if is_meant and field.implicit is not None and field.explicit is not None:
                yield _babi_pair(data, results, field.implicit, field.explicit)


def _babi_pair(data: str, results: BabiResults, implicit: Choice, explicit: Choice) -> Pair:
    if implicit.chosen is None or explicit.chosen is None:
        return _unchosen_pair(data, implicit, explicit)
    first, second = implicit.chosen, explicit.chosen
    shares = [_share_better(mine, other) for mine in first.points for other in second.points]
    text = (
        f"{results.name(first)} ({first.first.mode}){implicit.words} against "
        f"{results.name(second)} ({second.first.mode}){explicit.words}, {data}, "
    )
    evidence = Evidence(
        text=text + seeds_text([first.spread("accuracy"), second.spread("accuracy")]),
        run=first.first.run,
        data=data,
        modes=(first.first.mode, second.first.mode),
        num_seeds=min(len(first.points), len(second.points)),
        roles=(*first.roles, *second.roles),
    )
    return Pair(Spread.of(shares), evidence)


def _unchosen_pair(data: str, *choices: Choice) -> Pair:
    """Without a number: the test set must not choose."""
    first, second = (choice.rivals[0].first for choice in choices)
    counts = " and ".join(str(len(choice.rivals)) for choice in choices)
    evidence = Evidence(
        text=f"{counts} runs, {data}: no accuracy on the validation set chooses among them",
        run=first.run,
        data=data,
        modes=(first.mode, second.mode),
        num_seeds=0,
        roles=tuple(role for choice in choices for cell in choice.rivals for role in cell.roles),
    )
    return Pair(Spread((), num_missing=1), evidence)


def _share_better(first: BabiPoint, second: BabiPoint) -> float | None:
    """Share of the tasks that both answered on which the first is more accurate; a tie is not more accurate."""
    tasks = (first.accuracy_by_task or {}).keys() & (second.accuracy_by_task or {}).keys()
    if not tasks:
        return None
    better = [(first.of_task(int(task)) or 0.0) > (second.of_task(int(task)) or 0.0) for task in tasks]
    return sum(better) / len(better)
