"""The numbers of claims, of every model that has them, over its seeds.

A measure of word problems is read off their tests, for each run and test set. Of the quantities:
record: the mean of a value over the records of a model (over tokens and seeds, where each has a record).
gain_by_iterations, above_explicit: of sweeps of the iterations allowed at test time, seed by seed; explicit models by
their mean over seeds. A model in each mode that was swept is a model of its own.
layers_needed, growth_of_layers: by the mean over seeds, as in minimum_layers.py; a length that none of the depths
solves counts as one layer more than the deepest, which it needs at least.
growth_of_perplexity: seed by seed, in the mode that speaks for the model.
over_other_shares: of the branches of one curriculum, seed by seed, at the training length.
over_larger: every seed of an implicit model over every seed of a larger explicit one, at the training length.
settled_early: of the traces of the simultaneous iteration, at a quarter of its f-evaluations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import pandas as pd

from implicit_llm_report.babi import SAME_TOKENS
from implicit_llm_report.claims import Claim, Found
from implicit_llm_report.frame import Group, Spread, groups, roles_of, seeds_words, shares_of
from implicit_llm_report.measures import Measure, Quantity
from implicit_llm_report.minimum_layers import needed_of
from implicit_llm_report.model_groups import family_of
from implicit_llm_report.pairs import find_pairs, iterations_of
from implicit_llm_report.perplexity import branches_of, is_close, tokens_of
from implicit_llm_report.section import SectionInputs
from implicit_llm_report.test_time import ITERATIONS, MEASURES, swept_panels
from implicit_llm_report.word_problems import CELL, is_harder, serial_steps

HEADLINE = "headline"
COUNTED = ("accuracy_last10", "accuracy_sequence", "accuracy_token")  # shares of what was asked
SAME_SHARE = 0.02  # a branch leaves at a step, which no share of the steps meets exactly
Record = Mapping[str, Any]


def find(claim: Claim, given: SectionInputs) -> list[Found]:
    """Of every model that competes for it; one that was tested and gave no number has a spread that counts it."""
    if claim.measure is not None:
        return list(word_numbers(claim.measure, given.words))
    if claim.compare is not None:
        return list(find_pairs(claim.compare, given))
    return list(_FINDERS[claim.quantity.name](claim.quantity, given)) if claim.quantity is not None else []


def word_numbers(measure: Measure, rows: pd.DataFrame) -> Iterator[Found]:
    """Of each model and test set that a measure means."""
    for cells in _candidates(measure, groups(rows, CELL)):
        spread, first, modes = _measured(measure, cells), cells[0], tuple(cell.mode for cell in cells)
        test = f"length {first.length}, {100 * shares_of(first.hard_fraction)[-1]:g} % hard"
        text = f"{first.name}, {' and '.join(modes)}, {test}, {seeds_words(spread)}"
        roles = tuple(sorted({role for cell in cells for role in cell.roles}))
        is_count = measure.kind == "value" and measure.metric in COUNTED
        num_samples = min(number or 0 for number in first.rows["num_samples"]) if is_count else None
        yield Found(spread, text, first.name, first.data, modes, len(spread.values), roles, num_samples)


def _candidates(measure: Measure, cells: list[Group]) -> Iterator[tuple[Group, ...]]:
    """The cells (pairs of cells for a difference or ratio) that the claim speaks of."""
    meant = [cell for cell in cells if _is_meant(measure, cell)]
    first, second = measure.modes or (measure.mode, None)
    for cell in (cell for cell in meant if _is_mode(first, cell)):
        if measure.modes is None:
            yield (cell,)
        else:
            same = [other for other in meant if (other.name, other.data) == (cell.name, cell.data)]
            yield from ((cell, other) for other in same if _is_mode(second, other) and other is not cell)


def _is_mode(mode: str | None, cell: Group) -> bool:
    return cell.is_headline if mode == HEADLINE else mode in (None, cell.mode)


def _is_meant(measure: Measure, cell: Group) -> bool:
    for key in ("family", "group", "monoid", "num_layers", "train_length", "train_hard_fraction"):
        if getattr(measure, key) not in (None, getattr(cell, key)):
            return False
    if measure.is_harder not in (None, is_harder(cell)):
        return False
    if measure.model not in (None, "implicit" if cell.is_implicit else "explicit"):
        return False
    if measure.most_iterations is not None and not 0 < iterations_of(cell.solver) <= measure.most_iterations:
        return False
    factor = cell.length / cell.train_length if cell.train_length else None
    return measure.length_factor in (None, factor)


def _measured(measure: Measure, cells: tuple[Group, ...]) -> Spread:
    first, *others = (_by_seed_of(measure.metric, cell) for cell in cells)
    if not others:
        return Spread.of(first.values())
    combine = _difference if measure.kind == "difference" else _ratio
    return Spread.of(combine(value, others[0].get(seed)) for seed, value in first.items())


def _by_seed_of(metric: str, cell: Group) -> Mapping[Any, float | None]:
    if metric == "serial_steps":
        return serial_steps(cell)
    if metric != "above_chance":
        return cell.by_seed(metric)
    chance = cell.by_seed("chance_last10")
    return {seed: _difference(value, chance[seed]) for seed, value in cell.by_seed("accuracy_last10").items()}


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _ratio(first: float | None, second: float | None) -> float | None:
    return None if first is None or not second else first / second


def _found(spread: Spread, name: str, run: str, data: str, modes: tuple[str, ...], roles: Iterable[str]) -> Found:
    text = f"{name}, {seeds_words(spread)}"
    return Found(spread, text, run, data, modes, len(spread.values), tuple(dict.fromkeys(roles)))


def _records(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    groups: dict[tuple, list[Record]] = {}
    for record in given.inputs.records.get(quantity.kind, ()):
        is_trained_here = not record.get("sweep") and record.get("source") is None
        if is_trained_here and all(record.get(key) == value for key, value in (quantity.where or {}).items()):
            groups.setdefault((record["run"], record.get("phase"), record.get("data")), []).append(record)
    for (run, phase, data), records in groups.items():
        modes = tuple(str(records[0][key]) for key in ("mode", "against") if records[0].get(key))
        name = f"{run}/{phase}" + (f", {data}" if data else "")
        yield _found(_mean_by_seed(records, quantity), name, run, data or "", modes, _roles(records))


def _mean_by_seed(records: list[Record], quantity: Quantity) -> Spread:
    """A value a seed: the mean over those of its records that have one; a seed is missing if none has."""
    by_seed: dict[Any, list[float]] = {}
    for record in records:
        value, values = record.get(quantity.key or ""), by_seed.setdefault(record.get("seed"), [])
        if value is not None:
            values.append(value)
    return Spread.of(sum(values) / len(values) if values else None for values in by_seed.values())


def _roles(records: list[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record["role"] for record in records))


def _by_iterations(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    for panel in swept_panels(given):
        if panel.key != ITERATIONS or panel.measure != MEASURES[quantity.kind]:
            continue
        explicit = [model.spread(panel.measure) for model in panel.references.values()]
        for line in panel.lines:
            fewest, *_, most = line.cells[min(line.cells)], line.cells[max(line.cells)]
            values = most.by_seed(panel.measure)
            if quantity.family not in (None, most.family):
                continue
            if quantity.name == "gain_by_iterations":
                spread = _minus(values, fewest.by_seed(panel.measure))
            elif explicit:
                spread = _above(Spread.of(values.values()), explicit)
            else:
                continue
            name, roles = f"{most.run}, {line.base}, {panel.title}", roles_of(line.groups)
            yield _found(spread, name, most.run, most.data, (line.base,), roles)


def _minus(most: Mapping[Any, float | None], fewest: Mapping[Any, float | None]) -> Spread:
    pairs = [(most.get(seed), fewest.get(seed)) for seed in {**most, **fewest}]
    return Spread.of(None if first is None or second is None else first - second for first, second in pairs)


def _above(spread: Spread, explicit: list[Spread]) -> Spread:
    """Over the best of the explicit models."""
    means = [other.mean for other in explicit if other.mean is not None]
    if not means:
        return Spread((), spread.num_missing + 1)
    return Spread(tuple(value - max(means) for value in spread.values), spread.num_missing)


def _layers(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    for needed in needed_of(given):
        if quantity.model not in (None, "implicit" if needed.is_implicit else "explicit"):
            continue
        fewest = {length: needed.fewest(length) for length in needed.models}
        counts = [_count(found.num_layers, found.deepest, found.is_bound) for found in fewest.values()]
        if quantity.name == "growth_of_layers":
            if len(counts) < 2:
                continue
            value = _difference(counts[-1], counts[0])
        else:
            value = None if None in counts else max(count for count in counts if count is not None)
        name = f"{needed.label}: " + ", ".join(f"{found.words} at {length}" for length, found in fewest.items())
        data = f"lengths {min(fewest)} to {max(fewest)}"
        spread = Spread.of([None if value is None else float(value)])
        yield _found(spread, name, needed.label, data, (), needed.roles)


def _count(num_layers: int | None, deepest: int | None, is_bound: bool) -> int | None:
    if num_layers is not None:
        return num_layers
    return None if deepest is None or is_bound else deepest + 1


def _perplexity_growth(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    for comparison in given.perplexities.comparisons:
        if quantity.family not in (None, comparison.group.family):
            continue
        for line in comparison.headlines:
            if quantity.model not in (None, "implicit" if line.is_implicit else "explicit"):
                continue
            cells = line.cells("length")
            short, long = cells.get(line.train_length), cells.get((line.train_length or 0) * quantity.length_factor)
            if short is not None and long is not None:
                name = f"{line.run} ({line.mode}), {comparison.data}, length {long.length}"
                roles = roles_of([short, long])
                yield _found(_over(long, [short]), name, line.run, comparison.data, (line.mode,), roles)


def _over_other_shares(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    for comparison in given.perplexities.comparisons:
        for run in dict.fromkeys(line.run for line in comparison.headlines if line.is_implicit):
            branches = branches_of(comparison, run)
            wanted = next((share for share in branches if abs(share - quantity.share) <= SAME_SHARE), None)
            if wanted is None or len(branches) < 2:
                continue
            cells = {share: line.cells("length").get(line.train_length) for share, line in branches.items()}
            mine = cells.pop(wanted)
            others = [cell for cell in cells.values() if cell is not None]
            if mine is not None and others:
                words = " and ".join(f"{share:.0%}" for share in cells)
                name = f"{run}, {comparison.data}, {wanted:.0%} against {words}"
                roles = roles_of([mine, *others])
                yield _found(_over(mine, others), name, run, comparison.data, (mine.mode,), roles)


def _over_larger(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    known = [(comparison.data, line) for comparison in given.perplexities.comparisons for line in comparison.headlines]
    lines = [(data, line) for data, line in known if family_of(line.model_type) == quantity.family]
    for (data, mine), (other_data, other) in product(lines, lines):
        factor = (other.num_parameters or 0) / (mine.num_parameters or 1)
        is_pair = mine.is_implicit and not other.is_implicit and data == other_data
        cells = [line.cells("length").get(line.train_length) for line in (mine, other)]
        if not is_pair or not 1.5 <= factor <= 2.5 or not is_close(tokens_of(mine), tokens_of(other), SAME_TOKENS):
            continue
        found = [cell for cell in cells if cell is not None]
        if len(found) == 2:
            pairs = product(*(cell.by_seed("perplexity").values() for cell in found))
            spread = Spread.of(first / second if first and second else None for first, second in pairs)
            name = f"{mine.run} {mine.phase_label or ''} over {other.run}, {data}"
            yield _found(spread, name, mine.run, data, (mine.mode,), roles_of(found))


def _settled_early(quantity: Quantity, given: SectionInputs) -> Iterator[Found]:
    frame = given.inputs.frame
    rows = frame[(frame["kind"] == quantity.kind) & (frame["measure"] == "convergence") & frame["sweep"].isna()]
    for model in groups(rows, ("name", "data")):
        values = []
        for curve in model.curves("convergence"):
            quarter = curve["f_evaluations"][-1] / 4
            values.append(curve["agreement_with_last"][bisect_right(curve["f_evaluations"], quarter) - 1])
        yield _found(Spread.of(values), f"{model.name}, {model.data}", model.run, model.data, (), model.roles)


def _over(cell: Group, others: list[Group]) -> Spread:
    """Seed by seed the perplexity over the lowest of the others."""
    found, beside = [], [other.by_seed("perplexity") for other in others]
    for seed, value in cell.by_seed("perplexity").items():
        known = [number for by_seed in beside if (number := by_seed.get(seed))]
        found.append(value / min(known) if value and known else None)
    return Spread.of(found)


_FINDERS: dict[str, Callable[[Quantity, SectionInputs], Iterator[Found]]] = {
    "record": _records,
    "gain_by_iterations": _by_iterations,
    "above_explicit": _by_iterations,
    "layers_needed": _layers,
    "growth_of_layers": _layers,
    "growth_of_perplexity": _perplexity_growth,
    "over_other_shares": _over_other_shares,
    "over_larger": _over_larger,
    "settled_early": _settled_early,
}
