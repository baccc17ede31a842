"""The experiment that a call of Snakemake means when it names no config file: `snakemake paper`.

A target means the experiment of its name, or that whose results it lies in; figures and tables are the paper's.

Snakemake tells a Snakefile its targets only when the rules are complete, so they are looked for among the words of the
command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from implicit_llm_workflow.experiment_files.config_files import CONFIG_DIR, OWN_CONFIG_DIR, shown_path

DEFAULT, PAPER = "demo", "paper"
_EXPERIMENT = re.compile(r"([a-z][a-z0-9-]*)|results/([a-z][a-z0-9-]*)/.+")
_EXCERPT = re.compile(r"(figure|table)_[a-z0-9_]+")
_OPTIONS_BEFORE_NAMES = ("--profile", "--workflow-profile", "--directory", "-d")


def config_file_of(words: Sequence[str]) -> Path:
    """The file of the experiment that the first such target means, else the demo's.

    `words`: of the command, without the program.
    """
    for word in _perhaps_targets(words):
        name = _experiment_of(word)
        if name is not None and (path := _file_of(name)) is not None:
            return path
    return _file_of(DEFAULT) or OWN_CONFIG_DIR / f"{DEFAULT}.yaml"


def _perhaps_targets(words: Sequence[str]) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        if before not in _OPTIONS_BEFORE_NAMES:
            yield word


def _experiment_of(word: str) -> str | None:
    if _EXCERPT.fullmatch(word):
        return PAPER
    found = _EXPERIMENT.fullmatch(word)
    return found and (found[1] or found[2])


def _file_of(name: str) -> Path | None:
    paths = (folder / f"{name}.yaml" for folder in (OWN_CONFIG_DIR, CONFIG_DIR))
    return next((shown_path(path) for path in paths if path.is_file()), None)
