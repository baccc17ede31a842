"""Render the HTML pages, which load no other files; each number on the page of all numbers links to its runs."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from implicit_llm_contracts.plugins import Kinds
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, METRICS
from implicit_llm_report.claims.claims import BY_SEED, FAILS, HOLDS, MISSING, NOT_RUN, UNDECIDED, Judgement, Verdict
from implicit_llm_report.claims.verdicts import FROM_NOTE, LACKING, MARKS, counted, counted_new, rows_of, shown
from implicit_llm_report.config import FOLDER
from implicit_llm_report.figures.svg import Drawn, theme_css
from implicit_llm_report.inputs.frame import (
    LAST_TEN,
    PERPLEXITY,
    SHARES,
    Spread,
    count_words,
    groups,
    headlines,
    seeds_words,
)
from implicit_llm_report.inputs.layers import LAYERS
from implicit_llm_report.inputs.published import MARK_WORDS, Published
from implicit_llm_report.inputs.sources import Given, Source
from implicit_llm_report.inputs.training_runs import LOSS, TrainingRun, grouped
from implicit_llm_report.page.front import TABLES, facts_of, front_figures, front_tables
from implicit_llm_report.registry import figures_with, registry
from implicit_llm_report.sections import ROWS, PublishedRow
from implicit_llm_report.tables import Cell, Table

MISSING_WORD = Markup('<span class="missing">missing</span>')
NO_SETTINGS = ("seed", "phase.index", "phase.name")  # these only identify run and phase
ORIGINS = {"paper": "the paper", "project": "this project"}
TITLES = {
    "word_problem": "Word problems",
    "catbabi": "CatbAbI",
    "perplexity": "Language models",
    "lm_eval": "Downstream tasks",
}
PROTOCOL = ("eval_mode", "eval_block_len", "eval_stop", "eval_tol", "eval_max_iter")
WHOLE = "a sequence is solved as a whole"
AT_A_TIME = {
    "blockwise": "{} solved at a time",
    "sequential": "one token is solved at a time",
}
CRITERIA = {
    "token": "the relative residual of each",
    "sequence": "the mean relative residual of the block",
    "batch": "the norm over the batch",
}
SYMBOLS: dict[Verdict, str] = {HOLDS: "✓", BY_SEED: "≈", UNDECIDED: "≈", FAILS: "✗", NOT_RUN: "–", MISSING: "?"}


@dataclass(frozen=True)
class PageContent:
    """The content of the pages. `published`: empty if the table is not selected or no claim names the experiment."""

    title: str
    given: Given
    judgements: Sequence[Judgement]
    sections: Mapping[str, Sequence[Table]]
    figures: Sequence[Drawn]
    published: Sequence[PublishedRow]
    files: Mapping[str, Mapping[str, str]]  # the table files by name


def render(content: PageContent) -> dict[str, str]:
    """Return the pages by name: a first page and a page of all numbers for a report, one page for an excerpt."""
    given, config = content.given, content.given.config
    shared = {
        "content": content,
        "config": config,
        "light_css": Markup(theme_css(1)),
        "dark_css": Markup(theme_css(2)),
        "protocol": protocol_of(given),
        "entries": registry().tables,
        "symbols": SYMBOLS,
        "lacking": LACKING,
        "sources_of": partial(sources_of, given.sources),
        "git": git_words,
    }
    pages = {"index.html": ("everything.html.j2", _everything(content))}
    if config.is_whole:
        pages = {"index.html": ("front.html.j2", _front(content)), "numbers.html": pages["index.html"]}
    environment = _environment(given)
    made = {name: environment.get_template(file).render(shared | names) for name, (file, names) in pages.items()}
    return {name: re.sub(r"\n\s*\n+", "\n", page) + "\n" for name, page in made.items()}


def _front(content: PageContent) -> dict[str, Any]:
    given = content.given
    verdicts = rows_of([judgement.to_dict() for judgement in content.judgements])
    return {
        "verdicts": verdicts,
        "counted": counted(verdicts),
        "counted_new": counted_new(verdicts),
        "marks_note": MARKS if any(FROM_NOTE in row.paper for row in verdicts if row.is_asked and row.is_short) else "",
        "facts": facts_of(given),
        "front": front_figures(given),
        "tables": list(front_tables({name: ROWS[name](given) for name in TABLES}, given.config.front.models)),
    }


def _everything(content: PageContent) -> dict[str, Any]:
    given, config = content.given, content.given.config
    marks = {row.entry.mark for row in content.published} | {j.claim.mark for j in content.judgements if j.claim.mark}
    return {
        "origins": [
            (whose, [judgement for judgement in content.judgements if judgement.claim.origin == origin])
            for origin, whose in ORIGINS.items()
        ],
        "training": [_training(run, given.sources) for run in given.training if config.is_whole],
        "settings": hyperparameters(given),
        "all_sources": list(given.sources.values()),
        "anchors": {source.manifest.fingerprint: source.anchor for source in given.sources.values()},
        "used_marks": sorted(marks),
        "marks": given.published.marks,
        "not_run": NOT_RUN,
        "mark_words": MARK_WORDS,
    }


def protocol_of(given: Given) -> list[str]:
    """Return a sentence for each combination of evaluation settings of headline modes, by kind of result."""
    rows = headlines(given.measured[given.measured["is_implicit"].astype(bool)])
    found = groups(rows[rows["kind"].isin(TITLES) & rows["eval_mode"].notna()], ("kind", *PROTOCOL))
    return [
        f"{TITLES[one.kind]}: {AT_A_TIME.get(one.eval_mode, WHOLE).format(_tokens_are(one.eval_block_len))}, "
        f"until {CRITERIA.get(one.eval_stop, one.eval_stop)} is below {one.eval_tol:g}, "
        f"in at most {count_words(one.eval_max_iter, 'iteration')}."
        for one in found
        if one.eval_tol is not None
    ]


def _tokens_are(count: int | None) -> str:
    return "" if count is None else f"{count_words(count, 'token')} {'is' if count == 1 else 'are'}"


def _environment(given: Given) -> jinja2.Environment:
    """Return the environment of the templates, which has their filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "minus": minus,
        "spread": spread_words,
        "seeds": seeds_words,
        "count": count_words,
        "notes": partial(notes, published=given.published),
        "words": cell_words,
        "brief": brief,
        "caption": partial(caption, kinds=given.kinds),
        "commas": "{:,}".format,
        "by": partial(linked, sources=given.sources),
    }
    return environment


def caption(name: str, kinds: Kinds) -> Markup:
    """Return a figure's caption in HTML.

    Captions are reStructuredText, which `snakemake --report` also uses; their only markup is ``code``.
    """
    return Markup(re.sub(r"``(.+?)``", r"<code>\1</code>", html.escape(figures_with(kinds)[name].caption)))


def number(value: float | None, metric: str = "") -> Markup:
    """Return a share in percent, another number in a form that depends on its size, and "missing" for None.

    The forms are three decimals below 10, four significant digits below 10,000, and an exponent for other sizes.
    """
    if value is None:
        return MISSING_WORD
    if metric in SHARES:
        return Markup(shown(value, "percent") + "\u00a0%")
    size = abs(value)
    form = ".3f" if 1e-3 <= size < 10 or not size else ".4g" if 1e-3 <= size < 10_000 else ".2e"
    return Markup(minus(f"{value:{form}}"))


def cell_words(cell: Cell) -> Markup | str:
    """Return the number of a cell as text; a row of the metric LAYERS has its own text, such as "> 16"."""
    assert cell.group is not None
    if cell.metric == LAYERS:
        return MISSING_WORD if cell.spread.mean is None else str(cell.group.details("words")[0])
    return number(cell.spread.mean, cell.metric)


def brief(cell: Cell) -> Markup:
    """Return a number with its range over seeds and the number of missing seeds; shares are in percent, without "%"."""
    spread, form = cell.spread, "percent" if cell.metric in SHARES else "number"
    if spread.mean is None:
        return MISSING_WORD
    ends = [shown(end, form) for end in (spread.low, spread.high) if end is not None]
    lost = f' <span class="missing">{spread.num_missing} missing</span>' if spread.num_missing else ""
    between = f" <small>({ends[0]} to {ends[1]})</small>" if len(spread.values) > 1 and cell.over == "seed" else ""
    return Markup(f"{shown(spread.mean, form)}{between}{lost}")


def notes(cell: Cell, published: Published) -> list[Markup]:
    """Return the notes on a number: its range, missing seeds, f-evaluations, and the published number."""
    if cell.group is None or cell.metric in (LAYERS, "chance_last10"):
        return []
    group, spread = cell.group, cell.spread
    work, entry = group.spread("f_evaluations_per_token", "record").mean, published.beside(group, cell.metric)
    has_work = work is not None and cell.metric in (LAST_TEN, PERPLEXITY)
    found = [spread_words(spread, cell.metric), f"{number(work)} f/token" if has_work else ""]
    if entry is not None:
        words = "published code, our run:" if entry.mark == "reference_run" else "published"
        title = html.escape(published.marks[entry.mark])
        found.append(f'<span class="published" title="{title}">{words} {number(entry.value, cell.metric)}</span>')  # type: ignore[arg-type]
    return [Markup(words) for words in found if words]


def minus(text: str) -> str:
    """Replace the hyphens in the text of a number by minus signs, and drop the sign of a zero."""
    return re.sub(r"^-(0\.?0*)$", r"\1", text).replace("-", "−")


def spread_words(spread: Spread, metric: str = "") -> Markup:
    """Return the range over seeds, and the number of missing seeds if other seeds have a number."""
    ends = f"{number(spread.low, metric)} to {number(spread.high, metric)}" if len(spread.values) > 1 else ""
    is_partly = spread.num_missing and spread.values
    lost = f'<span class="missing">{spread.num_missing} missing</span>' if is_partly else ""
    return Markup(" ".join(filter(None, (ends, lost))))


def _training(run: TrainingRun, sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return a row of the table of training runs."""
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
        "devices": ", ".join(dict.fromkeys(_devices(record) for record in records if record.get("device"))),
    }


def _devices(record: Mapping[str, Any]) -> str:
    """Return the device of a job, preceded by the number of its processes if there were several."""
    count = record.get("processes", 1)
    return f"{count} × {record['device']}" if count > 1 else record["device"]


def hyperparameters(given: Given) -> dict[str, Any]:
    """Return the settings that all phases share, the keys of all other settings, and a row for each phase of each run.

    The settings in a row are those of the first seed.
    """
    places = [(run, phase) for run in given.training for phase in run.phases]
    rows: list[dict[str, Any]] = [
        {
            "run": run.run,
            "phase": phase.label,
            "seeds": [run.seed, *(other.seed for other, _ in others)],
            "settings": _settings(given.sources[phase.role]),
        }
        for (run, phase), *others in grouped(places, lambda place: (place[0].run, place[1].name)).values()
    ]
    found = [row["settings"] for row in rows]
    keys = {key: {str(values.get(key)) for values in found} for values in found for key in values}
    shared = {key: found[0][key] for key, values in keys.items() if len(values) == 1}
    return {"shared": shared, "differing": [key for key in keys if key not in shared], "rows": rows}


def _settings(source: Source) -> dict[str, Any]:
    """Return the settings of a training phase that are not None and not in NO_SETTINGS, by dotted keys."""
    flat = pd.json_normalize(source.manifest.config).to_dict("records")[0]
    return {key: value for key, value in flat.items() if value is not None and key not in NO_SETTINGS}


def linked(text: object, roles: Iterable[str], sources: Mapping[str, Source]) -> Markup:
    """Return `text` as a link to the first known run in `roles`; the tooltip names all known runs.

    Return plain text without a known run.
    """
    known = [sources[role] for role in dict.fromkeys(roles) if role in sources]
    link = Markup('<a class="n" href="#{}" title="{}">{}</a>')
    return link.format(known[0].anchor, "\n".join(map(origin_words, known)), text) if known else Markup.escape(text)


def origin_words(source: Source) -> str:
    """Return a text such as "evaluate/a5-s0/free/word-problem: fingerprint 0123…, MLflow run 4567…"."""
    run, tracked = source.manifest, source.provenance.get("mlflow_run_id") or "none"
    parts = [f"fingerprint {run.fingerprint[:FINGERPRINT_DIGITS]}", f"MLflow run {tracked}"]
    parts += [f"{METRICS} sha256 {file.sha256[:16]}" for file in run.records(lambda path: path.name == METRICS)]
    return f"{run.stage}/{run.name}: {', '.join(parts)}"


def sources_of(sources: Mapping[str, Source], roles: Iterable[str]) -> list[Source]:
    """Return the runs behind a number: first those in `roles`, then the training phases that made their models."""
    by_fingerprint = {source.manifest.fingerprint: source for source in sources.values()}
    pending = [sources[role] for role in dict.fromkeys(roles) if role in sources]
    found = {source.role: source for source in pending}
    while pending:
        upstream = pending.pop(0).manifest.upstream
        above = [by_fingerprint[upstream[role]] for role in ("model", "start") if upstream.get(role) in by_fingerprint]
        found |= {source.role: source for source in above}
        pending = above + pending
    return list(found.values())


def git_words(source: Source) -> str:
    """Return the commit of a run, and whether the checkout had uncommitted changes."""
    git = source.provenance.get("git") or {}
    changes = " with uncommitted changes" if git.get("is_dirty") else ""
    return f"{git['commit']}{changes}" if git.get("commit") else "not recorded"
