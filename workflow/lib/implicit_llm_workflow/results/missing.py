"""The results that a report lacks, why, and what makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_report.config import MissingResult
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import job_code
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_states import JobView, observe

WITH_MISSING = "-with-missing"


def find_missing(plan: Plan, page: Node) -> list[MissingResult]:
    """What a report or an excerpt of it lacks, in the order of its inputs."""
    missing = {role: key for role, key in page.upstream.items() if plan.statuses[key].state != "fresh"}
    jobs = observe(plan) if missing else {}
    return [_missing_result(plan, jobs, role, plan.nodes[key]) for role, key in missing.items()]


def report_with_missing(plan: Plan, page: Node, missing: Sequence[MissingResult]) -> tuple[Identity, dict[str, str]]:
    """The identity of the page made from the fresh results, and its inputs' directories; it has a folder of its own."""
    lacking = {item.role for item in missing}
    there = {role: key for role, key in page.upstream.items() if role not in lacking}
    config = {**page.config, "missing": [asdict(item) for item in missing]}
    upstream = {role: plan.identities[key].fingerprint for role, key in there.items()}
    code = plan.code_of(job_code(page.stage, config))
    identity = Identity(page.stage, f"{page.name}{WITH_MISSING}", config, code, upstream)
    return identity, {role: str(plan.root / key) for role, key in there.items()}


def _missing_result(plan: Plan, jobs: Mapping[str, JobView], role: str, node: Node) -> MissingResult:
    job = jobs[node.key]
    about: dict[str, Any] = {}
    if node.stage == "evaluate":
        read = {name: dict(plan.nodes[key].config) for name, key in node.upstream.items() if name != MODEL_ROLE}
        phase = plan.nodes[node.upstream[MODEL_ROLE]].config.get("phase")
        is_implicit = None if phase is None else phase["solver"] is not None  # of a peer not known before its import
        about = {"config": dict(node.config), "data": read, "is_implicit": is_implicit}
    why = job.why or _waits_for(jobs, job) or job.result.why
    return MissingResult(node.key, role, job.state, why, plan.command_for([node]), **about)


def _waits_for(jobs: Mapping[str, JobView], job: JobView) -> str | None:
    """The first job in the way of one that never ran: the one that failed, else the farthest back."""
    for before in (jobs[key] for key in job.node.upstream.values()):
        if not before.has_result:
            farther = _waits_for(jobs, before) or f"waits for {before.node.key}"
            return f"{before.node.key} failed: {before.why}" if before.state == "failed" else farther
    return None
