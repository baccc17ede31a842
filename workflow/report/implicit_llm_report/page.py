"""The page: one HTML file that needs nothing else; behind every number stand the runs that it comes from."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from implicit_llm_report.axes import power_of_ten
from implicit_llm_report.claims import BORDERLINE, FAILS, HOLDS, MISSING, NOT_RUN, Judgement
from implicit_llm_report.config import FOLDER, ReportConfig
from implicit_llm_report.frame import Group, Spread, seeds_words
from implicit_llm_report.inputs import ReportInputs, Source
from implicit_llm_report.lineage import command_words, git_words, lineage, origin_linker, sources_of
from implicit_llm_report.model_groups import short_count
from implicit_llm_report.perplexity import flops_of, tokens_of
from implicit_llm_report.published import MARK_WORDS, Published
from implicit_llm_report.registry import caption_of
from implicit_llm_report.section import Section
from implicit_llm_report.svg import Figure, panel_svg, swatch_svg, theme_css
from implicit_llm_report.training_runs import LOSS, TrainingRun
from implicit_llm_report.word_problems import glances, of_lengths

TEMPLATE = "index.html.j2"
MISSING_WORD = Markup('<span class="missing">missing</span>')
SYMBOLS = {HOLDS: "✓", BORDERLINE: "≈", FAILS: "✗", NOT_RUN: "–", MISSING: "?"}


@dataclass(frozen=True)
class PageContent:
    """Everything the page shows."""

    title: str
    config: ReportConfig
    words: pd.DataFrame
    inputs: ReportInputs
    judgements: Sequence[Judgement]
    sections: Mapping[str, Section]
    published: Published

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections.values() for figure in section.figures if figure is not None]

    @property
    def files(self) -> dict[str, Mapping[str, str]]:
        """The written tables by name."""
        return {name: forms for section in self.sections.values() for name, forms in section.files.items()}


def render(content: PageContent) -> str:
    """The page as text."""
    page = (
        _environment(content.inputs)
        .get_template(TEMPLATE)
        .render(
            content=content,
            light_css=Markup(theme_css(1)),
            dark_css=Markup(theme_css(2)),
            counts={
                verdict: sum(judgement.verdict == verdict for judgement in content.judgements) for verdict in SYMBOLS
            },
            glances=glances(of_lengths(content.words)) if content.config.is_whole else [],
            lineage=lineage(content.inputs, content.config),
            lost={item.role: item.state for item in content.config.missing},
            figures=[_figure(index, figure) for index, figure in enumerate(content.figures, start=1)],
            training=[
                _training(run, content.inputs.sources) for run in content.inputs.training if content.config.is_whole
            ],
            settings=hyperparameters(content.inputs),
            all_sources=list(content.inputs.sources.values()),
            anchors={source.fingerprint: source.anchor for source in content.inputs.sources.values()},
            used_marks=sorted(content.published.all_marks | {j.claim.mark for j in content.judgements if j.claim.mark}),
        )
    )
    return re.sub(r"\n\s*\n+", "\n", page) + "\n"


def _environment(inputs: ReportInputs) -> jinja2.Environment:
    """What the templates have at hand beside the content."""
    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "accuracy": accuracy,
        "number": number,
        "cost": cost,
        "minus": minus,
        "spread": spread_words,
        "seeds": seeds_words,
        "seeds_of": most_seeds,
        "slug": slug,
        "commas": commas,
        "short": lambda value: "unknown" if value is None else short_count(value),
        "perplexity": perplexity,
        "power": power_of_ten,
        "by": origin_linker(inputs.sources),
        "python_format": lambda form, value: minus(format(value, form)),
    }
    environment.globals |= {
        "sources_of": lambda roles: sources_of(inputs, roles),
        "symbols": SYMBOLS,
        "not_run": NOT_RUN,
        "flops_of": flops_of,
        "tokens_of": tokens_of,
        "mark_words": MARK_WORDS,
        "git": git_words,
        "command": command_words,
    }
    return environment


def caption(name: str) -> Markup:
    """A figure's caption: reStructuredText, which also serves `snakemake --report`, with ``code`` its only markup."""
    return Markup(re.sub(r"``(.+?)``", r"<code>\1</code>", html.escape(caption_of(name))))


def accuracy(value: float | None) -> Markup:
    """Three decimals; a missing number says so."""
    return MISSING_WORD if value is None else Markup(minus(f"{value:.3f}"))


def perplexity(value: float | None) -> Markup:
    """Four significant digits; a missing number says so."""
    return MISSING_WORD if value is None else Markup(f"{value:.4g}" if value < 10_000 else f"{value:.2e}")


def number(value: float | None) -> Markup:
    """Three significant digits; a missing number says so."""
    if value is None:
        return MISSING_WORD
    return Markup(minus(f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"))


def minus(text: str) -> str:
    """With a minus sign for the hyphen of a negative number, and none before a zero."""
    return re.sub(r"^-(0\.?0*)$", r"\1", text).replace("-", "−")


def commas(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def cost(value: float | None) -> Markup:
    """One decimal; a missing number says so."""
    return MISSING_WORD if value is None else Markup(f"{value:,.1f}")


def spread_words(spread: Spread, form: str = "accuracy") -> str:
    """The range over seeds, where there is one."""
    shown = {"accuracy": accuracy, "number": number, "perplexity": perplexity}[form]
    return f"{shown(spread.low)} to {shown(spread.high)}" if len(spread.values) > 1 else ""


def most_seeds(line: Group, metric: str) -> str:
    """The length with the most numbers says how many seeds there are."""
    spreads = [cell.spread(metric) for cell in line.cells("length").values()]
    return seeds_words(max(spreads, key=lambda spread: len(spread.values)))


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _figure(index: int, figure: Figure) -> dict[str, Any]:
    return {
        "number": index,
        "name": figure.name,
        "title": figure.title,
        "caption": caption(figure.name),
        "panels": [Markup(panel_svg(figure, panel)) for panel in range(len(figure.panels))],
        "legend": [{"label": series.label, "swatch": Markup(swatch_svg(figure, series))} for series in figure.legend],
        "roles": figure.roles,
        "is_wide": figure.is_wide,
    }


def _training(run: TrainingRun, sources: Mapping[str, Source]) -> dict[str, Any]:
    """A line of the table of training runs."""
    records = [sources[phase.role].provenance for phase in run.phases]
    busy_s = [attempt["busy_s"] for record in records for attempt in record.get("attempts") or []]
    losses = [phase.series(LOSS) for phase in run.last_phases]
    return {
        "run": run.run,
        "seed": run.seed,
        "phases": run.phases,
        "starts": {phase.name: before.name for phase in run.phases if (before := run.before(phase)) is not None},
        "steps": run.end_step,
        "losses": [None if loss.empty else loss.iloc[-1] for loss in losses],
        "minutes": sum(busy_s) / 60 if busy_s else None,
        "devices": ", ".join(dict.fromkeys(record["device"] for record in records if record.get("device"))),
    }


def hyperparameters(inputs: ReportInputs) -> dict[str, Any]:
    """A row for each phase of each run with the settings that differ between them, and what all rows share."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in inputs.training:
        for phase in run.phases:
            config = inputs.sources[phase.role].config
            values = {key: value for key, value in config.items() if key not in ("seed", "model_files")}
            about = {"run": run.run, "phase": phase.label, "seeds": [], "settings": dict(_flat(values))}
            row = rows.setdefault((run.run, phase.name), about)
            row["seeds"] += [run.seed] if run.seed is not None else []
    found = [row["settings"] for row in rows.values()]
    keys = list(dict.fromkeys(key for values in found for key in values))
    shared = {key: found[0][key] for key in keys if all(values.get(key) == found[0].get(key) for values in found)}
    differing = [key for key in keys if key not in shared and key not in ("phase.index", "phase.name")]
    return {"shared": shared, "differing": differing, "rows": list(rows.values())}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their path; those without a value are left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield before + key, value
