"""Which results a report lacks, why, and what makes them; and the report that does without."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import job_code
from implicit_llm_workflow.planning.fingerprint import MODEL_ROLE
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.journals import JOURNAL, read_tail
from implicit_llm_workflow.results.stale_numbers import changed_result

WITH_MISSING = "-with-missing"


@dataclass(frozen=True)
class MissingResult:
    """A result that is not fresh. `role`: what the report calls it; `state`: missing, stale or failed.

    Of an evaluation also its `config`, that of its data by role, and whether the model is implicit (None: not known):
    enough for the report to show each number that it would have given as missing.
    """

    job: str
    role: str
    state: str
    why: str
    command: str
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_implicit: bool | None = None


def find_missing(plan: Plan, page: Node) -> list[MissingResult]:
    """What a report or an excerpt of it lacks, in the order of its inputs."""
    upstream = page.upstream
    return [_missing_result(plan, role, plan.nodes[key]) for role, key in upstream.items() if _is_missing(plan, key)]


def report_with_missing(plan: Plan, page: Node, missing: Sequence[MissingResult]) -> tuple[Identity, list[str]]:
    """The identity of the page made of what is fresh, and its inputs as ROLE=DIR; it lies in a folder of its own."""
    lacking = {item.role for item in missing}
    there = {role: key for role, key in page.upstream.items() if role not in lacking}
    config = {**page.config, "missing": [asdict(item) for item in missing]}
    upstream = {role: plan.identities[key].fingerprint for role, key in there.items()}
    code = plan.code_of(job_code(page.stage, config))
    identity = Identity(page.stage, f"{page.name}{WITH_MISSING}", config, code, upstream)
    return identity, [f"{role}={plan.run_dir(plan.nodes[key])}" for role, key in there.items()]


def _is_missing(plan: Plan, key: str) -> bool:
    return plan.statuses[key].state != "fresh" or _changed(plan, plan.nodes[key]) is not None


def _changed(plan: Plan, node: Node) -> str | None:
    """How the numbers of a finished evaluation differ from those that its manifest vouches for."""
    return changed_result(plan.run_dir(node)) if node.stage == "evaluate" else None


def _missing_result(plan: Plan, role: str, node: Node) -> MissingResult:
    status, failure = plan.statuses[node.key], _failure(plan, node)
    state: str = status.state
    why = status.why
    if failure is not None:
        state, why = "failed", failure
    elif state == "missing":
        why = _waits_for(plan, node) or why
    elif state == "fresh":
        state, why = "stale", _changed(plan, node) or why
    about: dict[str, Any] = {}
    if node.stage == "evaluate":
        read = {name: plan.nodes[key].config for name, key in node.upstream.items() if name != MODEL_ROLE}
        about = {"config": dict(node.config), "data": read, "is_implicit": _is_implicit(plan, node)}
    # A changed file is found by the job itself, which starts when its manifest is gone.
    remove = f"{shlex.join(['rm', '-f', plan.manifest(node)])} && " if status.state == "fresh" else ""
    return MissingResult(node.key, role, state, why, remove + plan.command_for([node]), **about)


def _waits_for(plan: Plan, node: Node) -> str | None:
    """The first job in the way of one that never ran: the one that failed, else the farthest back."""
    for key in node.upstream.values():
        if _is_missing(plan, key):
            before = plan.nodes[key]
            failure = _failure(plan, before)
            return f"{key} failed: {failure}" if failure else _waits_for(plan, before) or f"waits for {key}"
    return None


def _failure(plan: Plan, node: Node) -> str | None:
    """How the last attempt at the wanted result ended, by the journal; None if it did not fail."""
    work = work_directory(plan.run_dir(node), plan.identities[node.key].fingerprint)
    event = read_tail(work / JOURNAL).event or {}
    return " ".join(str(event.get("error")).split()) if event.get("name") == "stage_failed" else None


def _is_implicit(plan: Plan, node: Node) -> bool | None:
    """None for a peer, whose kind is known when it has been imported."""
    phase = plan.nodes[node.upstream[MODEL_ROLE]].config.get("phase")
    return None if phase is None else phase["solver"] is not None
