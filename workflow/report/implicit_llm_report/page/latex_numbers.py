r"""Write the report's numbers for a manuscript: \result{kind/run/phase/data/mode/length/metric} in numbers.tex.

A key has the values of a record in the columns PLACES, without missing values. With several seeds, there are also keys
with a suffix: `.low` and `.high` for the range, `.seeds` for the number of seeds with a value. A claim has
the key claim/<id>, and claim/<id>.verdict for the verdict in words. In a key, a hyphen replaces spaces and other
characters that LaTeX does not accept there.

A number that could not be measured is \resultmissing, and never zero. A number that the report does not have is also
\resultmissing, with a warning, so a manuscript that uses it compiles and shows that it is missing.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import starmap

import pandas as pd

from implicit_llm_report.claims.claims import Judgement
from implicit_llm_report.inputs.frame import COSTS, Group, Metrics, Spread, groups, metrics_of
from implicit_llm_report.inputs.sources import Given

FILE_NAME = "numbers.tex"
# The columns that identify a number of a kind, in the order of a key.
PLACES = ("kind", "run", "phase", "setting", "task", "data", "protocol", "against", "mode", "length")
MISSING = r"\resultmissing"
DEFINITION = r"\resultdef{{{}}}{{{}}}"
HEAD = r"""% Numbers of the experiment {experiment}: \input this file, then \result{{key}}.
% Made by `implicit-llm report`: do not edit.
\providecommand{{\resultmissing}}{{\textbf{{??}}}}
\providecommand{{\resultdef}}[2]{{\expandafter\gdef\csname result@#1\endcsname{{#2}}}}
\providecommand{{\result}}[1]{{\ifcsname result@#1\endcsname\csname result@#1\endcsname\else
  \resultmissing\GenericWarning{{}}{{LaTeX Warning: no result `#1' in numbers.tex}}\fi}}
"""


def latex_numbers(given: Given, judgements: Sequence[Judgement]) -> str:
    """Return the text of the file: the definitions of all numbers, each after a comment that names its runs."""
    lines = [HEAD.format(experiment=given.config.experiment)]
    lines += [f"% lacks {item.job} ({item.state}); made by: {item.command}" for item in given.config.missing]
    metrics = metrics_of(given.kinds)
    for group in groups(given.measured, PLACES):
        known = ((role, given.sources.get(role)) for role in group.roles)
        runs = (f"{role} {at.manifest.fingerprint[:16] if at else 'missing'}" for role, at in known)
        lines += [f"% {'; '.join(runs)}", *starmap(DEFINITION.format, _definitions(group, metrics))]
    lines.append("% claims")
    for judgement in judgements:
        key = f"claim/{_word(judgement.claim.id)}"
        numbers = ((f"{key}{end}", value) for end, value in _spread(judgement.spread))
        lines += [*starmap(DEFINITION.format, numbers), DEFINITION.format(f"{key}.verdict", judgement.verdict)]
    return "\n".join(lines) + "\n"


def _definitions(group: Group, known: Metrics) -> Iterator[tuple[str, str]]:
    """Yield key and text of each number of a group; the value of a seed is the mean over its records."""
    key = "/".join(_word(part) for place in PLACES if not pd.isna(part := getattr(group, place)))
    metrics = known.get(group.kind) or sorted(set(group.metrics).difference(COSTS))
    spreads = {metric: Spread.of(group.by_seed(metric).values()) for metric in (*metrics, *COSTS)}
    for metric, spread in spreads.items():
        if metric in metrics or spread.values:
            yield from ((f"{key}/{_word(metric)}{end}", value) for end, value in _spread(spread))


def _spread(spread: Spread) -> Iterator[tuple[str, str]]:
    yield "", latex_number(spread.mean)
    if len(spread.values) + spread.num_missing > 1:
        yield ".low", latex_number(spread.low)
        yield ".high", latex_number(spread.high)
        yield ".seeds", str(len(spread.values))


def latex_number(value: float | None) -> str:
    """Return a number with four significant digits, in mathematical mode if it is negative or has a power of ten."""
    if value is None:
        return MISSING
    text = f"{value:.4g}"
    mantissa, has_power, power = text.partition("e")
    if has_power:
        return rf"\ensuremath{{{mantissa}\times10^{{{int(power)}}}}}"
    return rf"\ensuremath{{{text}}}" if text.startswith("-") else text


def _word(part: object) -> str:
    """Return `part` for the key of a \\csname: a hyphen replaces each run of characters but letters, digits, ._=@+-."""
    return re.sub(r"[^A-Za-z0-9._=@+-]+", "-", str(part))
