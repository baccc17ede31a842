"""The results that a report lacks, why, and what makes them; and the results that changed after they were made."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.runs import (
    FINGERPRINT_DIGITS,
    MANIFEST,
    METRICS,
    Identity,
    Manifest,
    ManifestError,
    UserError,
)
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import job_code
from implicit_llm_workflow.planning.plan import LOCAL_PROFILE, MODEL_ROLE, Plan
from implicit_llm_workflow.results.job_states import ObservedJob, observe

WITH_MISSING = "-with-missing"
OF_TRAINING = "losses and solver health"


class StaleNumbers(UserError):
    """A report would show other numbers than it was asked for."""


@dataclass(frozen=True)
class MissingResult:
    """A result that is not fresh. `role`: its name in the report; `state`: missing, stale or failed.

    Of an evaluation also its `config`, the config of its data by role, and whether the model is implicit (None: not
    known): enough for the report to show each number that it would have given as missing.
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
    missing = {role: plan.nodes[key] for role, key in page.upstream.items() if _is_missing(plan, key)}
    jobs = observe(plan) if missing else {}
    return [_missing_result(plan, jobs, role, node) for role, node in missing.items()]


def report_with_missing(plan: Plan, page: Node, missing: Sequence[MissingResult]) -> tuple[Identity, list[str]]:
    """The identity of the page made from the fresh results, and its inputs as ROLE=DIR; it has a folder of its own."""
    lacking = {item.role for item in missing}
    there = {role: key for role, key in page.upstream.items() if role not in lacking}
    config = {**page.config, "missing": [asdict(item) for item in missing]}
    upstream = {role: plan.identities[key].fingerprint for role, key in there.items()}
    code = plan.code_of(job_code(page.stage, config))
    identity = Identity(page.stage, f"{page.name}{WITH_MISSING}", config, code, upstream)
    return identity, [f"{role}={plan.run_dir(plan.nodes[key])}" for role, key in there.items()]


def numbers_of(job: str, kind: str | None) -> str:
    """What numbers come from a job, in one or two words; `kind` is that of an evaluation."""
    if not job.startswith("evaluate/"):
        return OF_TRAINING
    return EVALUATION_KINDS[kind].numbers if kind else "results"


def stale_error(upstream: Mapping[str, str], directories: Mapping[str, Path], experiment: str) -> StaleNumbers | None:
    """One error that names each number that changed since its job finished or is not the wanted one, and the command.

    None where the inputs in these directories have the wanted fingerprints (by role), and their numbers are whole.
    """
    found = {}
    for role, directory in directories.items():
        path, job = directory / MANIFEST, role.replace(":", "/", 1)
        manifest = Manifest.find(path)
        why = _why_stale(directory, manifest, upstream.get(role))
        if why is not None:
            numbers = numbers_of(job, None if manifest is None else manifest.config.get("kind"))
            found[path.as_posix()] = f"{numbers} of {job}: {why}"
    if not found:
        return None
    remove, config = shlex.join(["rm", "-f", *found]), f"workflow/config/{experiment}.yaml"
    make = shlex.join(["snakemake", "--configfile", config, "--profile", LOCAL_PROFILE, *found])
    return StaleNumbers(
        f"stale numbers: {'; '.join(found.values())}. Type `{remove} && {make}`, or `implicit-llm report --config "
        f"{experiment} --missing` for a report without them"
    )


def _why_stale(run_dir: Path, manifest: Manifest | None, wanted: str | None) -> str | None:
    if manifest is None:
        return f"{run_dir / MANIFEST} is not there or cannot be read"
    if manifest.fingerprint != (wanted or manifest.fingerprint):
        found = manifest.fingerprint[:FINGERPRINT_DIGITS]
        return f"its manifest carries fingerprint {found}, wanted is {(wanted or '')[:FINGERPRINT_DIGITS]}"
    try:
        manifest.verify(run_dir, "sha256", lambda path: path.name == METRICS)
    except (ManifestError, OSError) as error:
        return str(error).partition("; type")[0]
    return None


def _why_changed(plan: Plan, node: Node) -> str | None:
    """How the metrics of a finished evaluation differ from its manifest; None if they do not, or there are none."""
    recorded = plan.statuses[node.key].recorded
    if node.stage != "evaluate" or recorded is None:
        return None
    return _why_stale(plan.run_dir(node), recorded, recorded.fingerprint)


def _is_missing(plan: Plan, key: str) -> bool:
    return plan.statuses[key].state != "fresh" or _why_changed(plan, plan.nodes[key]) is not None


def _missing_result(plan: Plan, jobs: Mapping[str, ObservedJob], role: str, node: Node) -> MissingResult:
    status, job = plan.statuses[node.key], jobs[node.key]
    state, why = str(status.state), status.why
    if job.state == "failed":
        state, why = "failed", job.why
    elif state == "missing":
        why = _waits_for(plan, jobs, node) or why
    elif state == "fresh":
        state, why = "stale", _why_changed(plan, node) or why
    about: dict[str, Any] = {}
    if node.stage == "evaluate":
        read = {name: plan.nodes[key].config for name, key in node.upstream.items() if name != MODEL_ROLE}
        phase = plan.nodes[node.upstream[MODEL_ROLE]].config.get("phase")
        is_implicit = None if phase is None else phase["solver"] is not None  # of a peer not known before its import
        about = {"config": dict(node.config), "data": read, "is_implicit": is_implicit}
    # The job itself finds a changed file; it starts when its manifest is gone.
    remove = f"{shlex.join(['rm', '-f', plan.manifest(node)])} && " if status.state == "fresh" else ""
    return MissingResult(node.key, role, state, why, remove + plan.command_for([node]), **about)


def _waits_for(plan: Plan, jobs: Mapping[str, ObservedJob], node: Node) -> str | None:
    """The first job in the way of one that never ran: the one that failed, else the farthest back."""
    for key in node.upstream.values():
        if _is_missing(plan, key):
            before = _waits_for(plan, jobs, plan.nodes[key]) or f"waits for {key}"
            return f"{key} failed: {jobs[key].why}" if jobs[key].state == "failed" else before
    return None
