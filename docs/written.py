"""Write the generated parts of the pages, between the comments that name them, and the pages of complete tables.

    python docs/written.py

They come from the kept results; a test compares them.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from implicit_llm_report.claims.verdicts import MARKS, counted, markdown, merged, rows_of, short_markdown

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
EXPERIMENTS = ("state-tracking", "language-models")  # the first one that ran a claim has it


def verdicts() -> list[str]:
    """Every claim that was tested."""
    rows = _rows()
    return ["", counted(rows), "", *markdown(row for row in rows if row.is_run), "", MARKS, ""]


def short_verdicts() -> list[str]:
    """The headline claims."""
    rows = _rows()
    return ["", counted(rows), "", *short_markdown(rows), "", MARKS, ""]


def not_run() -> list[str]:
    """The claims that no kept experiment tests."""
    return [
        "",
        "| claim | paper |",
        "|---|---|",
        *(f"| {row.claim} | {row.paper} |" for row in _rows() if not row.is_run),
        "",
    ]


def _rows() -> list:
    return rows_of(merged(json.loads((REFERENCE / name / "claims.json").read_text())["claims"] for name in EXPERIMENTS))


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "verdicts": verdicts,
    "short-verdicts": short_verdicts,
    "claims-not-run": not_run,
}
PAGES = ("README.md", "docs/index.md", "docs/results.md")
_PART = re.compile(r"(<!-- begin ([a-z0-9-]+)[^>]*-->\n).*?(<!-- end \2 -->)", re.DOTALL)


def written(text: str) -> str:
    """The text of a page with all its generated parts as they are now."""
    return _PART.sub(lambda found: found[1] + "\n".join([*PARTS[found[2]](), found[3]]), text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
