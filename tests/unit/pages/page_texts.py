"""Texts of the pages, cells of their tables, and the kept results that their numbers come from."""

import json
import re
import runpy

from tests.pages import ROOT

NOTEBOOK = "results/reference/state-tracking/NOTES.md"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


BENCHMARKS = ROOT / "results" / "benchmarks"
MODELS = {"mamba2": "Mamba2 130M", "llama3": "Llama 130M"}


def benchmark(name: str, card: str = "h200") -> dict:
    return json.loads((BENCHMARKS / f"{name}-{card}.json").read_text(encoding="utf-8"))


def cells(text: str, *start: str) -> list[str]:
    """The cells of the one row that starts with these."""
    (row,) = re.findall("^" + re.escape("| " + " | ".join(start) + " | ") + r"(.*) \|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def digits(value: float) -> float:
    """Three significant digits, as the pages have them."""
    return float(f"{value:.3g}")


def rounded(ms: float) -> float:
    return digits(ms) if ms < 1000 else round(ms)


WRITTEN = runpy.run_path(str(ROOT / "docs/written.py"))
LANGUAGE_MODELS = ROOT / "results/reference/language-models"
STATE_TRACKING = ROOT / "results/reference/state-tracking"
TRAINED = ROOT / "implicit_llm/trained"
