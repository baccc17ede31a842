"""List the results that a report lacks, why they are missing and the commands that make them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from implicit_llm_contracts.config.flops import UncountedModel, num_parameters
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_report.config import MissingResult
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import job_code
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_states import JobView, observe

WITH_MISSING = "-with-missing"
IN_PROGRESS = ("running", "queued")


def find_missing(plan: Plan, page: Node) -> list[MissingResult]:
    """Return the results that a report or excerpt lacks, in the order of its inputs."""
    missing = {role: key for role, key in page.upstream.items() if plan.statuses[key].state != "fresh"}
    jobs = observe(plan) if missing else {}
    return [_missing_result(plan, jobs, role, plan.nodes[key]) for role, key in missing.items()]


def report_with_missing(plan: Plan, page: Node, missing: Sequence[MissingResult]) -> tuple[Identity, dict[str, str]]:
    """Return the identity of a page that is made from the fresh results alone, and their run directories by role.

    This page has another name than the complete page, and therefore its own folder.
    """
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
        is_implicit = None if phase is None else phase["solver"] is not None  # not known before the import
        about = {"config": dict(node.config), "data": read, "is_implicit": is_implicit}
        if any(one.state in IN_PROGRESS for one in (job, *_missing_before(jobs, job))):
            about["training"] = _training(plan, plan.nodes[node.upstream[MODEL_ROLE]])
    why = job.why or _waits_for(jobs, job) or job.result.why
    return MissingResult(node.key, role, job.state, why, plan.command_for([node]), **about)


def _training(plan: Plan, node: Node) -> dict[str, Any]:
    """Return the fields of evaluation records that the settings of a training job determine; {} for an import.

    With these fields, a claim about the model counts as not finished, instead of not run, before its training ends.
    """
    if node.stage != "train":
        return {}
    model, data = node.config["model"], plan.nodes[node.upstream["data"]].config
    about = {
        "model_type": model.get("model_type"),
        "num_layers": model.get("num_hidden_layers"),
        "train_length": data.get("length"),
        "train_hard_fraction": data.get("hard_fraction"),
    }
    if "length" in data:  # the data set of a plugin may have none
        about["train_tokens"] = node.config["phase"]["end_step"] * node.config["batch_size"] * data["length"]
    with suppress(UncountedModel):
        about["num_parameters"] = num_parameters(model)
    return about


def _waits_for(jobs: Mapping[str, JobView], job: JobView) -> str | None:
    """Return why a job waits: the failed job before it, or else its earliest missing input; None if none is missing."""
    missing = list(_missing_before(jobs, job))
    failed = next((one for one in missing if one.state == "failed"), None)
    if failed is not None:
        return f"{failed.node.key} failed: {failed.why}"
    return f"waits for {missing[0].node.key}" if missing else None


def _missing_before(jobs: Mapping[str, JobView], job: JobView) -> Iterator[JobView]:
    """Yield the direct and indirect inputs of a job that have no result, each after its own missing inputs.

    An input is yielded once for each path that leads to it.
    """
    for before in (jobs[key] for key in job.node.upstream.values()):
        if not before.has_result:
            yield from _missing_before(jobs, before)
            yield before
