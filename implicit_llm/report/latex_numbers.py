r"""The report's numbers for a manuscript: \result{kind/run/phase/data/mode/length/metric} in numbers.tex.

A key is made of the record's own words; `.low` and `.high` after it are the range over seeds, `.seeds` their number. A
number that could not be measured is \resultmissing, and so is, with a warning, one that the report does not have: it is
never a zero, and a manuscript that asks for it still compiles and shows the hole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from implicit_llm.report.claims import Judgement
from implicit_llm.report.config import Hole
from implicit_llm.report.inputs import ReportInputs
from implicit_llm.report.results import Spread

FILE_NAME = "numbers.tex"
METRICS = {
    "word_problem": ("accuracy_last10", "accuracy_sequence", "accuracy_token", "chance_last10"),
    "perplexity": ("perplexity", "perplexity_within_documents", "loss"),
    "catbabi": ("accuracy", "lm_accuracy", "lm_perplexity"),
    "duality": ("token_agreement", "kl", "logit_distance_mean", "logit_distance_max"),
    "jacobian": ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference"),
}
COSTS = ("f_evaluations_per_token", "unconverged_share")
# What tells records of one kind apart beside run, phase and mode.
PLACES = ("setting", "task", "data", "protocol", "against", "length")
MISSING = r"\resultmissing"
HEAD = r"""% Numbers of the experiment {experiment}: \input this file, then \result{{key}}.
% Made by `implicit-llm report`: do not edit.
\providecommand{{\resultmissing}}{{\textbf{{??}}}}
\providecommand{{\resultdef}}[2]{{\expandafter\gdef\csname result@#1\endcsname{{#2}}}}
\providecommand{{\result}}[1]{{\ifcsname result@#1\endcsname\csname result@#1\endcsname\else
  \resultmissing\GenericWarning{{}}{{LaTeX Warning: no result `#1' in numbers.tex}}\fi}}
"""


def latex_numbers(
    experiment: str, inputs: ReportInputs, judgements: Sequence[Judgement], holes: Sequence[Hole] = ()
) -> str:
    """The file as text: a definition a number, with the runs that it comes from in a comment."""
    lines = [HEAD.format(experiment=experiment)]
    for hole in holes:
        lines.append(f"% lacks {hole.job} ({hole.state}); made by: {hole.command}")
    for kind, records in sorted(inputs.records.items()):
        for group in _groups(records).values():
            lines.append(f"% {_source_words(group, inputs)}")
            lines += [f"\\resultdef{{{key}}}{{{value}}}" for key, value in _definitions(kind, group)]
    lines.append("% claims")
    for judgement in judgements:
        key = f"claim/{_word(judgement.claim.id)}"
        lines += [f"\\resultdef{{{key}{end}}}{{{value}}}" for end, value in _spread(judgement.spread)]
        lines.append(f"\\resultdef{{{key}.verdict}}{{{judgement.verdict}}}")
    return "\n".join(lines) + "\n"


def key_of(kind: str, record: Mapping[str, Any]) -> str:
    """ "perplexity/text-implicit/free/text-test/blockwise/128" without the metric."""
    parts = [kind, record["run"], record.get("phase"), *(record.get(place) for place in PLACES[:-1])]
    parts += [record.get("mode"), record.get("length")]
    return "/".join(_word(part) for part in parts if part is not None)


def _groups(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The records of one thing over its seeds, and its tokens where it has a record for each."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(key_of("", record), []).append(record)
    return found


def _definitions(kind: str, records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    key = key_of(kind, records[0])
    if kind == "lm_eval":
        named = {name: [(r.get("metrics") or {}).get(name) for r in records] for name in _metric_names(records)}
    else:
        named = {name: [r.get(name) for r in records] for name in METRICS.get(kind, ())}
    costs = {name: [r.get(name) for r in records] for name in COSTS if any(r.get(name) is not None for r in records)}
    for name, values in (named | costs).items():
        for end, value in _spread(Spread.of(values)):
            yield f"{key}/{_word(name)}{end}", value


def _metric_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for record in records for name in record.get("metrics") or {}})


def _spread(spread: Spread) -> Iterator[tuple[str, str]]:
    yield "", latex_number(spread.mean)
    if len(spread.values) + spread.num_missing > 1:
        yield ".low", latex_number(spread.low)
        yield ".high", latex_number(spread.high)
        yield ".seeds", str(len(spread.values))


def latex_number(value: float | None) -> str:
    """Four significant digits; powers of ten in mathematics."""
    if value is None:
        return MISSING
    text = f"{value:.4g}"
    mantissa, has_power, power = text.partition("e")
    if has_power:
        return rf"\ensuremath{{{mantissa}\times10^{{{int(power)}}}}}"
    return rf"\ensuremath{{{text}}}" if text.startswith("-") else text


def _source_words(records: Sequence[Mapping[str, Any]], inputs: ReportInputs) -> str:
    roles = dict.fromkeys(str(record["role"]) for record in records)
    known = ((role, inputs.sources.get(role)) for role in roles)
    return "; ".join(f"{role} {source.fingerprint[:16] if source else 'missing'}" for role, source in known)


def _word(part: object) -> str:
    """Letters that \\csname takes as they are."""
    return re.sub(r"[^A-Za-z0-9._=@+-]+", "-", str(part))
