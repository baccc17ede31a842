"""Where the numbers of the page come from: the runs behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from markupsafe import Markup

from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, METRICS
from implicit_llm_report.inputs.sources import Source


def origin_linker(sources: Mapping[str, Source]) -> Callable[[object, Iterable[str]], Markup]:
    """A filter for templates: a number as a link to its run; text without a run behind it stays as it is."""

    def linked(text: object, roles: Iterable[str]) -> Markup:
        known = [sources[role] for role in dict.fromkeys(roles) if role in sources]
        if not known:
            return Markup.escape(text)
        words = "\n".join(map(origin_words, known))
        return Markup('<a class="n" href="#{}" title="{}">{}</a>').format(known[0].anchor, words, text)

    return linked


def origin_words(source: Source) -> str:
    """ "evaluate/a5-s0/free/word-problem: fingerprint 0123…, MLflow 4567…, metrics.json sha256 89ab…"."""
    run, tracked = source.manifest, source.provenance.get("mlflow_run_id") or "none"
    parts = [f"fingerprint {run.fingerprint[:FINGERPRINT_DIGITS]}", f"MLflow run {tracked}"]
    parts += [f"{METRICS} sha256 {file.sha256[:16]}" for file in run.records(lambda path: path.name == METRICS)]
    return f"{run.stage}/{run.name}: {', '.join(parts)}"


def sources_of(sources: Mapping[str, Source], roles: Iterable[str]) -> list[Source]:
    """The runs behind a number: each evaluation, then the training phases that made its model."""
    by_fingerprint = {source.manifest.fingerprint: source for source in sources.values()}
    pending = [sources[role] for role in dict.fromkeys(roles) if role in sources]
    found = {source.role: source for source in pending}
    while pending:
        upstream = pending.pop(0).manifest.upstream
        above = [by_fingerprint[upstream[role]] for role in ("model", "start") if upstream.get(role) in by_fingerprint]
        found |= {source.role: source for source in above}
        pending = above + pending
    return list(found.values())


def git_words(source: Source) -> str:
    """The commit a run was made with, and whether the tree had changes beside it."""
    git = source.provenance.get("git") or {}
    if not git.get("commit"):
        return "not recorded"
    return git["commit"] + (" with uncommitted changes" if git.get("is_dirty") else "")
