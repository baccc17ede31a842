"""Where the numbers of the page come from: the runs behind each, and the jobs from data to report as a nested list."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from implicit_llm_contracts.hints import natural
from implicit_llm_report.config import DataPart, ReportConfig
from implicit_llm_report.inputs.sources import TRAIN, ReportInputs, Source

RESULT_FILE = "metrics.json"
MAX_SHOWN = 6  # runs that one tooltip names
SHORT = 16  # digits of a fingerprint

# By run and seed the roles of the jobs.
Jobs = dict[str, dict[int | None, list[str]]]


def origin_linker(sources: Mapping[str, Source]) -> Callable[[object, Iterable[str]], Markup]:
    """A filter for templates: a number as a link to its run; text without a run behind it stays as it is."""

    def linked(text: object, roles: Iterable[str]) -> Markup:
        known = [sources[role] for role in dict.fromkeys(roles) if role in sources]
        if not known:
            return Markup.escape(text)
        words = "\n".join(map(origin_words, known[:MAX_SHOWN]))
        if len(known) > MAX_SHOWN:
            words += f"\nand {len(known) - MAX_SHOWN} more"
        return Markup('<a class="n" href="#{}" title="{}">{}</a>').format(known[0].anchor, words, text)

    return linked


def origin_words(source: Source) -> str:
    """ "evaluate/a5-s0/free/word-problem: fingerprint 0123…, MLflow 4567…, metrics.json sha256 89ab…"."""
    digests = [file.sha256[:16] for file in source.files if file.path.rpartition("/")[2] == RESULT_FILE]
    tracked = source.provenance.get("mlflow_run_id") or "none"
    parts = [f"fingerprint {source.fingerprint[:SHORT]}", f"MLflow run {tracked}"]
    parts += [f"{RESULT_FILE} sha256 {digest}" for digest in digests]
    return f"{source.stage}/{source.name}: {', '.join(parts)}"


def sources_of(inputs: ReportInputs, roles: Iterable[str]) -> list[Source]:
    """The runs behind a number: the evaluations, then the training phases that made their models."""
    by_fingerprint = {source.fingerprint: source for source in inputs.sources.values()}
    evaluations = [inputs.sources[role] for role in dict.fromkeys(roles) if role in inputs.sources]
    found = {source.role: source for source in evaluations}
    pending = evaluations
    while pending:
        source = pending.pop(0)
        above = (by_fingerprint.get(source.upstream.get(role, "")) for role in ("model", "start"))
        following = [other for other in above if other is not None]
        found |= {other.role: other for other in following}
        pending = following + pending
    return list(found.values())


def git_words(source: Source) -> str:
    """The commit a run was made with, and whether the tree had changes beside it."""
    git = source.provenance.get("git") or {}
    if not git.get("commit"):
        return "not recorded"
    return git["commit"] + (" with uncommitted changes" if git.get("is_dirty") else "")


def command_words(source: Source) -> str:
    """The command line of a run, without the path of the program; the identity, a page of JSON, by its fingerprint."""
    argv = [str(word) for word in source.provenance.get("argv") or []]
    if not argv:
        return "not recorded"
    words = [Path(argv[0]).name, *argv[1:]]
    if "--identity" in words[:-1]:
        words[words.index("--identity") + 1] = f"@{source.fingerprint[:SHORT]}"
    return shlex.join(words)


@dataclass(frozen=True)
class DataJobs:
    """A data set: its parts with their fingerprints, and the jobs of the runs on it."""

    name: str
    parts: dict[str, str]
    jobs: Jobs


def lineage(inputs: ReportInputs, config: ReportConfig) -> list[DataJobs]:
    """All jobs behind a report, missing ones too, by data set; phases as they follow one another, then evaluations."""
    parts: dict[str, dict[str, str]] = {}
    read: dict[str, str] = {}
    for source in sorted(inputs.sources.values(), key=lambda source: source.stage != TRAIN):
        for role, fingerprint in source.upstream.items():
            if role not in ("model", "start"):
                known = inputs.data.get(fingerprint)
                name = known.name if known else f"{role} {fingerprint[:SHORT]}"
                data = config.data.get(name, DataPart()).data or name
                parts.setdefault(data, {})[name] = fingerprint
                read.setdefault(source.job.run, data)  # training comes first and decides
    found: dict[str, Jobs] = {}
    for role in sorted(
        {*inputs.sources, *(item.role for item in config.missing)}, key=lambda r: _order(r, inputs, config)
    ):
        job = config.jobs[role]
        found.setdefault(read.get(job.run, ""), {}).setdefault(job.run, {}).setdefault(job.seed, []).append(role)
    return [DataJobs(name or "other data", parts.get(name, {}), jobs) for name, jobs in sorted(found.items())]


def _order(role: str, inputs: ReportInputs, config: ReportConfig) -> tuple:
    job = config.jobs[role]
    phase = inputs.sources[role].config.get("phase") or {} if role in inputs.sources else {}
    steps = phase.get("start_step", 0), phase.get("end_step", 0)
    return natural(job.run), job.seed or 0, job.evaluation is not None, steps, role
