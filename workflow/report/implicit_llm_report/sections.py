"""The sections of a report: each kind of result brings its figures, its tables and its part of the page.

A new kind of result adds a module with its builder, which imports from section.py, and a line in BUILDERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from implicit_llm_contracts.plugins import FIGURES
from implicit_llm_report.babi import accuracy_by_babi_task, babi_files, babi_tables
from implicit_llm_report.downstream import downstream_files
from implicit_llm_report.duality import duality_section
from implicit_llm_report.jacobian import jacobian_section
from implicit_llm_report.minimum_layers import minimum_layers_section
from implicit_llm_report.peers_section import peers_section
from implicit_llm_report.perplexity import perplexity_files
from implicit_llm_report.perplexity_figures import (
    curriculum,
    perplexity_by_length,
    perplexity_by_parameters,
    perplexity_by_position,
)
from implicit_llm_report.published_section import published_section
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.table_text import files_of
from implicit_llm_report.test_time import test_time_section
from implicit_llm_report.training_figures import loss_by, solver_health, spectral_radius_along_training, training_curves
from implicit_llm_report.training_runs import FLOPS, TOKENS
from implicit_llm_report.word_problems import accuracy_section, of_lengths

MISSING = "missing"


def missing_section(given: SectionInputs) -> Section | None:
    """A row for each; None for a report that has all its results."""
    missing = given.config.missing
    if not missing:
        return None
    rows = [{"result": h.job, "state": h.state, "why": h.why, "made by": h.command} for h in missing]
    files = {MISSING: files_of([("Missing results", rows)], {"result": "result", "state": "state", "why": "why"}, {})}
    return Section(MISSING, "sections/missing.html.j2", missing, files=files)


def perplexity_section(given: SectionInputs) -> Section | None:
    """Language models on held-out text."""
    tables = given.perplexities.comparisons
    if not tables:
        return None
    files = {"perplexity": perplexity_files(tables, given.published)}
    found = given.perplexities
    by_rows = (perplexity_by_length(found), perplexity_by_position(found))
    figures = (*by_rows, perplexity_by_parameters(found), curriculum(found))
    return Section("perplexity", "sections/perplexity.html.j2", tables, figures, files)


def language_training_section(given: SectionInputs) -> Section | None:
    """Losses of language models on the way, which need no evaluation."""
    groups = given.perplexities.groups
    return Section(
        "language-training", figures=[loss_by(axis, given.inputs.training, groups) for axis in (TOKENS, FLOPS)]
    )


def downstream_section(given: SectionInputs) -> Section | None:
    """Language models on tasks of the lm-eval harness."""
    tables = given.downstream.tables
    if given.downstream.rows.empty:
        return None
    files = {"downstream": downstream_files(tables)} if tables else {}
    return Section("downstream", "sections/downstream.html.j2", tables, files=files)


def babi_section(given: SectionInputs) -> Section | None:
    """Questions of CatbAbI."""
    tables = babi_tables(given.babi)
    if not tables:
        return None
    files = {"babi": babi_files(tables, given.published)}
    return Section("babi", "sections/babi.html.j2", tables, (accuracy_by_babi_task(given.babi),), files)


def training_section(given: SectionInputs) -> Section | None:
    """Training curves and the solver's health, of all runs but those that only tell how many layers a length takes."""
    left_out = set(given.words["run"]) - set(of_lengths(given.words)["run"])
    training = [run for run in given.inputs.training if run.run not in left_out] or given.inputs.training
    figures = (
        training_curves(training, given.words, given.perplexities.groups),
        solver_health(training),
        spectral_radius_along_training(training),
    )
    return Section("training", figures=figures)


def plugins_section(given: SectionInputs) -> Section | None:
    """Figures of plugins."""
    figures = [draw(given) for _, draw in FIGURES.values()]
    return Section("plugins", figures=figures) if figures else None


# In the order of the page.
BUILDERS: tuple[Callable[[SectionInputs], Section | None], ...] = (
    missing_section,
    accuracy_section,
    minimum_layers_section,
    perplexity_section,
    language_training_section,
    downstream_section,
    peers_section,
    babi_section,
    test_time_section,
    duality_section,
    jacobian_section,
    published_section,
    training_section,
    plugins_section,
)


def build_sections(given: SectionInputs) -> dict[str, Section]:
    """By name, those that have something to show of what the configuration asks for."""
    sections = [_asked(section, given) for build in BUILDERS if (section := build(given)) is not None]
    return {section.name: section for section in sections if section is not None}


def _asked(section: Section, given: SectionInputs) -> Section | None:
    """The section with the figures and tables that the configuration names; None where nothing is left."""
    config = given.config
    if config.is_whole or section.name == MISSING:
        return section
    figures = [f for f in section.figures if f is not None and (config.figures is None or f.name in config.figures)]
    files = {name: forms for name, forms in section.files.items() if config.tables is None or name in config.tables}
    if not figures and not files:
        return None
    return replace(section, figures=figures, files=files, template=section.template if files else None)
