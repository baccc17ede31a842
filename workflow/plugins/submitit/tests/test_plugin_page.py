"""docs/further.md has every setting, with its default, and every class of failure."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from snakemake_executor_plugin_submitit.attempts import CLASSES
from snakemake_executor_plugin_submitit.settings import ExecutorSettings

PAGE = Path(__file__).parents[1] / "docs" / "further.md"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_setting_stands_there_with_its_default() -> None:
    shown = {
        name: default.strip("`") for names, default, _ in rows("Settings") for name in re.findall(r"`([a-z-]+)`", names)
    }
    defaults = {field.name.replace("_", "-"): field.default for field in fields(ExecutorSettings)}
    assert shown == {name: "" if value is None else str(value) for name, value in defaults.items()}


def test_every_class_of_failure_has_its_rule() -> None:
    named = {word for names, *_ in rows("Stopping and resuming") for word in names.split(", ")}
    assert named == set(CLASSES)
