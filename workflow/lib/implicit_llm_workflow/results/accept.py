"""Accept results that differ from the wanted ones in their code alone; refuse those with another config or input."""

import shlex
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.run_directory import AGAIN, COMMIT, FREED
from implicit_llm_workflow.planning.code_digest import changes_since
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import ACCEPTED, Acceptance, difference_of, with_code_of


class NotAcceptable(UserError):
    """A target matches no job or has nothing to accept or revoke, or its result differs in more than its code."""


def chosen_jobs(plan: Plan, targets: Iterable[str]) -> dict[str, bool]:
    """Return, by key, the jobs of the targets: True if a target names the job in full, False if only patterns match it.

    Raises: UnknownTarget; NotAcceptable for a pattern that matches no job.
    """
    chosen: dict[str, bool] = {}
    for target in targets:
        is_pattern = any(character in target for character in "*?[")
        keys = [key for key in plan.nodes if fnmatchcase(key, target)] if is_pattern else [plan.find(target).key]
        if not keys:
            raise NotAcceptable(f"{target}: no job matches; `{plan.list_command}` lists them")
        for key in keys:
            chosen[key] = chosen.get(key, False) or not is_pattern
    return {key: chosen[key] for key in plan.nodes if key in chosen}


def new_acceptances(plan: Plan, chosen: dict[str, bool], why: str) -> dict[str, Acceptance]:
    """Return an acceptance for each chosen job whose result differs from the wanted one in its code alone.

    An input that was accepted earlier or in this call counts as unchanged. A job that only patterns match is skipped if
    it has nothing to accept. Nothing is written. `why`: the user's reason.
    Raises: NotAcceptable; a result that differs in more than its code is refused even if only patterns match its job.
    """
    found: dict[str, Acceptance] = {}
    when = datetime.now(UTC).isoformat(timespec="seconds")

    def settle(key: str, wanted: Identity) -> Identity:
        usual = plan.settle(key, wanted)
        if key not in chosen:
            return usual
        recorded = plan.statuses[key].recorded
        if recorded is None or recorded.fingerprint == usual.fingerprint:
            if chosen[key]:
                why_not = plan.statuses[key].why or "is fresh"
                raise NotAcceptable(f"{key}: {why_not}, so that there is nothing to accept")
            return usual
        changed = _require_other_code_alone(plan, key, recorded, wanted)
        found[key] = Acceptance(
            recorded.fingerprint, wanted.fingerprint, recorded.code, wanted.code, changed, when, why
        )
        identity = with_code_of(found[key], wanted)
        if identity is None:
            verify = f"implicit-llm verify {plan.argument} {shlex.quote(key)}"
            raise NotAcceptable(f"{key}: its manifest is not that of its fingerprint; type `{verify}`")
        return identity

    plan.identify(settle)
    return found


def take_back(plan: Plan, chosen: dict[str, bool]) -> list[str]:
    """Delete the acceptances of the chosen jobs; return the keys of the jobs that had one.

    Raises: NotAcceptable if no job had one.
    """
    files = {key: path for key in chosen if (path := plan.root / key / ACCEPTED).exists()}
    if not files:
        raise NotAcceptable(f"{', '.join(chosen)}: nothing was accepted; `{plan.list_command}` shows what was")
    for path in files.values():
        path.unlink()
    return list(files)


def take_back_forced(plan: Plan, chosen: dict[str, bool]) -> list[str]:
    """Cancel the forced reruns of the chosen jobs; return the keys of the jobs that were forced.

    Raises: NotAcceptable if no job was forced.
    """
    found = {key: work for key in chosen if ((work := Path(plan.work[key])) / AGAIN).exists()}
    if not found:
        raise NotAcceptable(f"{', '.join(chosen)}: nothing was forced; `{plan.list_command}` shows what was")
    for work in found.values():
        if not (work / FREED).exists():  # without the manifest, a job that needs the freed files makes them again
            write_atomic(work / MANIFEST, (work / COMMIT).read_bytes())
        (work / AGAIN).unlink()
    return list(found)


def _require_other_code_alone(plan: Plan, key: str, recorded: Manifest, wanted: Identity) -> tuple[str, ...] | None:
    """Return which code changed, or None if the old code was not recorded.

    Raises: NotAcceptable if config or inputs differ too.
    """
    others = replace(difference_of(recorded, wanted, plan.nodes[key]), code=None)
    if reasons := "; ".join(others.reasons()):
        raise NotAcceptable(
            f"{key}: not only its code changed ({reasons}), which makes another result; accept inputs as well if only "
            "their code changed, else run the workflow"
        )
    return changes_since(plan.root, recorded.code, plan.code(plan.nodes[key]))
