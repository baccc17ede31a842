"""Behind every number of the page: which runs it comes from, on hover and as a link to the first of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from markupsafe import Markup

from implicit_llm.report.inputs import Source

RESULT_FILE = "metrics.json"
MAX_SHOWN = 6  # runs that one tooltip names


def origin_linker(sources: Mapping[str, Source]) -> Callable[[object, Iterable[str]], Markup]:
    """A filter for templates: a number as a link to its run; text without a run behind it (a hole) stays as it is."""

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
    parts = [f"fingerprint {source.fingerprint[:16]}", f"MLflow run {source.provenance.get('mlflow_run_id') or 'none'}"]
    parts += [f"{RESULT_FILE} sha256 {digest}" for digest in digests]
    return f"{source.stage}/{source.name}: {', '.join(parts)}"
