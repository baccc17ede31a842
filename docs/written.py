"""Write the generated parts of the pages, between the comments that name them, complete tables, and the figures.

    python docs/written.py

They come from the kept results; a test compares them.
"""

import json
import re
import runpy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from implicit_llm_report.claims.claims import MISSING
from implicit_llm_report.claims.verdicts import (
    FROM_NOTE,
    MARKS,
    counted,
    counted_new,
    evidence,
    markdown,
    merged,
    outcomes,
    rows_of,
    short_markdown,
    table,
)

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
EXPERIMENTS = {  # their models, for claims that several of them test
    "state-tracking": "Mamba2, 1.5M",
    "language-models": "Llama, 21M",
    "language-models-repeated": "Llama, 21M, repeated text",
    "language-models-mamba2": "Mamba2, 21M",
    "language-models-130m": "Llama, 130M",
}
SMALL_SCALES = {"demo", "miniature"}  # claims of these alone are judged by their own reports


def verdicts() -> list[str]:
    """Return every claim that was tested."""
    rows = _rows()
    head = f"{counted(rows)} New claims: {counted_new(rows)}."
    return ["", head, "", *noted(markdown(row for row in rows if row.is_run))]


def noted(table: list[str]) -> list[str]:
    """The table, and what its mark means where it has one."""
    return [*table, *(["", MARKS] if any(FROM_NOTE in line for line in table) else []), ""]


def short_verdicts() -> list[str]:
    """The headline claims and the failed claims of the paper; untested ones are in the count above them alone."""
    rows = _rows()
    shown = [row for row in rows if row.is_run and (row.is_headline or not row.is_new) and row.state != MISSING]
    return ["", counted(rows), "", *noted(short_markdown(shown))]


def evidence_list() -> list[str]:
    """Return the evidence for each verdict."""
    return ["", *evidence(row for row in _rows() if row.is_run), ""]


def not_run() -> list[str]:
    """The claims that no kept experiment tests."""
    rows = ((row.claim, "not of the paper" if row.is_new else row.paper) for row in _rows() if not row.is_run)
    return ["", *table("claim | paper", rows), ""]


def outcomes_by_figure() -> list[str]:
    """Return every claim of the paper, by figure."""
    return ["", *outcomes(_rows()), ""]


def _rows() -> list:
    entries = merged({models: _entries(experiment) for experiment, models in EXPERIMENTS.items()})
    return rows_of(entry for entry in entries if {*entry["scales"]} - SMALL_SCALES)


def _entries(experiment: str) -> list:
    """The claims of an experiment; none before its report is kept."""
    kept = REFERENCE / experiment / "claims.json"
    return json.loads(kept.read_text(encoding="utf-8"))["claims"] if kept.exists() else []


TRACKING = runpy.run_path(str(REFERENCE / "state-tracking/rows.py"))
LANGUAGE = runpy.run_path(str(REFERENCE / "language-models/rows.py"))["TABLES"]


def of_experiments(*names: str) -> list[str]:
    """The headline claims that each experiment can test, in one table."""
    return ["", *noted(short_markdown(row for name in names for row in rows_of(_entries(name)) if row.is_asked))]


def state_tracking_tables() -> str:
    """The page of complete tables."""
    parts = [(title, TRACKING["table"](name)) for name, (title, *_) in TRACKING["TABLES"].items() if title]
    lines = [line for title, rows in parts for line in ("", f"## {title}", "", *rows)]
    return "\n".join([HEAD, *lines, ""])


def language_model_tables() -> str:
    """The complete tables of language models."""
    lines = [line for name, title in LANGUAGE_TITLES.items() for line in ("", f"## {title}", "", *LANGUAGE[name]())]
    return "\n".join([LANGUAGE_HEAD, *lines, ""])


LANGUAGE_HEAD = """# Language models: complete tables

Written by `docs/written.py` from the kept results: means over seeds. [Language models](../language-models.md) explains
them."""
LANGUAGE_TITLES = {
    "language-final": "Loss on held-out text, with its 95 % interval and 10^15 FLOPs of training",
    "language-lengths": "The same by length, with the range of the seeds",
    "language-agreement": "Tokens that two modes of evaluation predict alike",
    "language-choices": "Learning rates and weight decay",
}
HEAD = """# State tracking: complete tables

Written by `docs/written.py` from the kept results. A cell has the seeds in percent: the last ten tokens,
unless its head says otherwise. [State tracking](../state-tracking.md) explains them."""
PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "verdicts": verdicts,
    "short-verdicts": short_verdicts,
    "claims-not-run": not_run,
    "outcomes": outcomes_by_figure,
    "evidence": evidence_list,
    "claims-state-tracking": partial(of_experiments, "state-tracking"),
    "claims-language-models": partial(of_experiments, *(name for name in EXPERIMENTS if name != "state-tracking")),
    **{name: partial(lambda name: ["", *TRACKING["table"](name), ""], name) for name in TRACKING["TABLES"]},
    **{
        name: partial(lambda name: ["", *LANGUAGE[name](), ""], name)
        for name in ("language-regulariser", "language-ingredients")
    },
}
PAGES = (
    *("README.md", "docs/index.md", "docs/results.md", "docs/paper.md"),
    *("docs/state-tracking.md", "docs/language-models.md", "docs/catbabi.md"),
)
DRAWN = ("hero.py", "state_tracking.py", "language_model_losses.py", "performance.py")
WHOLE = {
    "docs/reference/state-tracking-tables.md": state_tracking_tables,
    "docs/reference/language-models-tables.md": language_model_tables,
}
_PART = re.compile(r"(<!-- begin ([a-z0-9-]+)[^>]*-->\n).*?(<!-- end \2 -->)", re.DOTALL)


def written(text: str) -> str:
    """The text of a page with all its generated parts as they are now."""
    return _PART.sub(lambda found: found[1] + "\n".join([*PARTS[found[2]](), found[3]]), text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    for page, text in WHOLE.items():
        (ROOT / page).write_text(text(), encoding="utf-8")
    for script in DRAWN:
        runpy.run_path(str(ROOT / "docs/images" / script), run_name="__main__")


if __name__ == "__main__":
    main()
