"""The section of a report that names the results it lacks."""

from __future__ import annotations

from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.table_text import csv_text, escape

NAME = "holes"
HEAD = ("result", "state", "why", "made by")


def holes_section(given: SectionInputs) -> Section | None:
    """A row for each; None for a report that has all its results."""
    holes = given.config.holes
    if not holes:
        return None
    rows = [(hole.job, hole.state, hole.why, hole.command) for hole in holes]
    lines = [" & ".join(escape(text) for text in row[:3]) + r" \\" for row in rows]
    head = [r"\begin{tabular}{lll}", r"\toprule", r"result & state & why \\", r"\midrule"]
    tex = "\n".join([*head, *lines, r"\bottomrule", r"\end{tabular}", ""])
    return Section(NAME, "sections/holes.html.j2", holes, files={NAME: {"csv": csv_text(HEAD, rows), "tex": tex}})
