"""docs/reliability.md and the README beside this file name tests that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/reliability.md", "tests/fault/README.md")
)
REFERENCE = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)?(?:::(test_\w+))?`")


def references() -> Iterator[tuple[str, str | None]]:
    """(file, test or None) of each reference; `::test_x` alone belongs to the file named before it."""
    file = ""
    for found in REFERENCE.finditer(PAGES):
        file = found[1] or file
        if found[1] or found[2]:
            yield file, found[2]


def test_every_test_of_the_page_exists() -> None:
    named = list(references())
    assert len(named) > 50
    for file, test in named:
        paths = [ROOT / file] if "/" in file else list((ROOT / "tests").rglob(file))
        assert len(paths) == 1, file
        assert paths[0].is_file(), file
        assert test is None or f"def {test}(" in paths[0].read_text(encoding="utf-8"), (file, test)


def test_every_row_of_the_page_has_a_test() -> None:
    rows = [line for line in PAGES.splitlines() if re.match(r"\| \d+ ", line)]
    assert [row for row in rows if ".py" not in row.rsplit("|", 2)[1]] == []
    assert len(rows) >= 27
