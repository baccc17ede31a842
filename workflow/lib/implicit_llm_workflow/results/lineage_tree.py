"""A lineage as a tree for people and as JSON for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from implicit_llm_contracts.runs.run_directory import DECLARED, FINGERPRINT_DIGITS
from implicit_llm_workflow.planning.accepted import Acceptance
from implicit_llm_workflow.results.lineage import Ancestor, Lineage

COMMIT_DIGITS = 10


def tree_of(lineage: Lineage) -> Tree:
    """The result above what it was made from; a run that was told of before is only named again."""
    top = lineage.runs[lineage.top]
    first = escape(run_text(top))
    if lineage.artifact is not None:
        record = next(file for file in top.files if file.path == lineage.artifact)
        shown = lineage.artifact.rpartition(f"/{DECLARED}/")[2]
        tree = Tree(escape(f"{shown} (sha256 {record.sha256[:FINGERPRINT_DIGITS]})"))
        branch = tree.add(first)
    else:
        tree = branch = Tree(first)
    _add_inputs(branch, lineage, top, {top.fingerprint})
    return tree


def run_text(run: Ancestor) -> str:
    """Fingerprint, MLflow run, commit, device and time of a run in one line, and a line for each exception."""
    parts = [run.key, run.fingerprint[:FINGERPRINT_DIGITS], f"mlflow {run.mlflow_run_id or 'none'}"]
    if not run.provenance:
        parts.append("provenance not recorded")
    else:
        parts += [_commit_text(run), str(run.provenance.get("device")), str(run.provenance.get("finished"))]
    return "\n".join(["  ".join(parts), *map(_acceptance_text, run.acceptances)])


def as_json(lineage: Lineage) -> dict[str, Any]:
    """Every run once; inputs by fingerprint."""
    return {
        "top": lineage.top,
        "artifact": lineage.artifact,
        "runs": [_run_values(run) for run in lineage.runs.values()],
        "not_found": [
            {"run": key, "role": role, "fingerprint": fingerprint} for key, role, fingerprint in lineage.missing()
        ],
    }


def _add_inputs(branch: Tree, lineage: Lineage, run: Ancestor, told: set[str]) -> None:
    for role, fingerprint in run.upstream.items():
        source = lineage.runs.get(fingerprint)
        if source is None:
            branch.add(f"[red]{escape(role)}: not found[/red]  {fingerprint[:FINGERPRINT_DIGITS]}")
        elif fingerprint in told:
            again = ", told above" if source.upstream else ""
            branch.add(escape(f"{source.key}  {fingerprint[:FINGERPRINT_DIGITS]}{again}"))
        else:
            told.add(fingerprint)
            _add_inputs(branch.add(escape(run_text(source))), lineage, source, told)


def _commit_text(run: Ancestor) -> str:
    git = run.provenance.get("git") or {}
    if not git.get("commit"):
        return "no commit"
    return f"commit {git['commit'][:COMMIT_DIGITS]}{' (edited)' if git.get('is_dirty') else ''}"


def _acceptance_text(acceptance: Acceptance) -> str:
    changed = "what changed is not recorded" if acceptance.changed is None else ", ".join(acceptance.changed)
    codes = f"{acceptance.recorded_code[:12]} -> {acceptance.wanted_code[:12]}"
    return f"accepted {acceptance.when[:10]} with other code ({codes}; {changed}): {acceptance.why}"


def _run_values(run: Ancestor) -> dict[str, Any]:
    return {
        "job": run.key,
        "fingerprint": run.fingerprint,
        "run_dir": run.run_dir.as_posix(),
        "manifest": run.path.as_posix(),
        "code": run.code,
        "config": run.config,
        "inputs": run.upstream,
        "mlflow_run_id": run.mlflow_run_id,
        "provenance": run.provenance or None,
        "accepted": [asdict(acceptance) for acceptance in run.acceptances],
    }
