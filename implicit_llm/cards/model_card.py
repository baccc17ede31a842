"""A model card of Hugging Face: a YAML head that its hub reads, and a page for people.

Cards tell what is known when a model is saved, and nothing that differs between equal runs: no time, host or device,
and no name either, which belongs to an experiment and not to the identity.
They are plumbing of the code digest: another wording trains nothing again, and saved models keep the card they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard, ModelCardData

FILE_NAME = "README.md"
PAPER = {
    "authors": "Mark Schöne, Babak Rahmani, Heiner Kremer, Fabian Falck, Hitesh Ballani, Jannes Gladrow",
    "bibtex_authors": "Schöne, Mark and Rahmani, Babak and Kremer, Heiner and Falck, Fabian and Ballani, Hitesh "
    "and Gladrow, Jannes",
    "title": "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity",
    "arxiv": "2502.07827",
}


class ModelCardError(Exception):
    """What was rendered is no model card: a bug of the template."""


def render_card(template: str, head: ModelCardData, values: Mapping[str, Any]) -> str:
    """The card: the template of this folder with `values`, below the head.

    Raises: ModelCardError when its head does not read as what was given; jinja2.UndefinedError for a missing value.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # noqa: S701  (Markdown, not HTML)
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": cell, "number": number, "commas": lambda value: f"{value:,}"}
    page = environment.get_template(template).render(**values, paper=PAPER)
    text = f"---\n{head.to_yaml(line_break=chr(10))}\n---\n\n{page}"
    if ModelCard(text).data.to_dict() != head.to_dict():
        raise ModelCardError(f"{template}: the head of the card reads as {ModelCard(text).data.to_dict()}")
    return text


def cell(value: Any) -> str:
    """A value in a table: on one line, without borders of cells."""
    text = {True: "yes", False: "no", None: "–"}.get(value) if value is None or isinstance(value, bool) else str(value)
    return " ".join(str(text).split()).replace("|", r"\|")


def number(value: float | None) -> str:
    """A measured number to four digits."""
    return "not finite" if value is None or value != value or abs(value) == float("inf") else f"{value:.4g}"
