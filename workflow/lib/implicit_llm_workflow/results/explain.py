"""Which jobs the next run of the workflow will do, why each of them, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from implicit_llm_workflow.estimates.cost import Cost, CostModel
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import JobCode
from implicit_llm_workflow.planning.code_record import ChangedFile, changed_files, code_now, read_code_record
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import Status


@dataclass(frozen=True)
class CodeChange:
    """`files`: None where the old code was not recorded."""

    module: str
    old: str
    new: str
    files: tuple[ChangedFile, ...] | None


_Changes = dict[tuple[JobCode, str], CodeChange]


@dataclass(frozen=True)
class ExplainedJob:
    """A job that is not fresh. `runs`: whether the next run does it; a missing result that nobody needs stays away."""

    key: str
    stage: str
    status: Status
    runs: bool
    code: CodeChange | None
    cost: Cost


@dataclass(frozen=True)
class KeptJob:
    """A job whose result is fresh, and what that took."""

    key: str
    stage: str
    accepted: str | None
    cost: Cost


@dataclass(frozen=True)
class Explanation:
    """Of the targets and all that they are made from, in the order of the plan."""

    jobs: list[ExplainedJob]
    kept: list[KeptJob]

    @property
    def running(self) -> list[ExplainedJob]:
        return [job for job in self.jobs if job.runs]


def explain(plan: Plan, targets: Iterable[str] = ()) -> Explanation:
    """Of the targets; of the whole experiment if there are none. Raises: UnknownTarget."""
    wanted = [plan.find(target).key for target in targets] or plan.wanted
    reached = upstream_closure(plan, wanted)
    running = _running(plan, wanted, reached)
    costs = CostModel(plan)
    changes: _Changes = {}
    jobs, kept = [], []
    for key in reached:
        node, status = plan.nodes[key], plan.statuses[key]
        if status.state == "fresh":
            why = status.accepted.why if status.accepted is not None else None
            kept.append(KeptJob(key, node.stage, why, costs.recorded(node)))
        else:
            code = _code_change(plan, node, status, changes)
            jobs.append(ExplainedJob(key, node.stage, status, key in running, code, costs.of(node)))
    return Explanation(jobs, kept)


def upstream_closure(plan: Plan, keys: Iterable[str]) -> list[str]:
    """The nodes and all that they are made from, in the order of the plan."""
    found: set[str] = set()
    waiting = list(keys)
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting.extend(plan.nodes[key].upstream.values())
    return [key for key in plan.nodes if key in found]


def _running(plan: Plan, targets: Iterable[str], reached: list[str]) -> set[str]:
    """What Snakemake will do: what is stale, and what is missing as far as a target or a job that runs needs it."""
    needed = set(targets)
    running: set[str] = set()
    for key in reversed(reached):
        state = plan.statuses[key].state
        if state == "stale" or (state == "missing" and key in needed):
            running.add(key)
            needed.update(plan.nodes[key].upstream.values())
    return running


def _code_change(plan: Plan, node: Node, status: Status, known: _Changes) -> CodeChange | None:
    if status.difference is None or status.difference.code is None:
        return None
    old, new = status.difference.code
    code = plan.code(node)
    if (code, old) not in known:
        record = read_code_record(plan.root, old)
        files = None if record is None else tuple(changed_files(record, code_now(code)))
        known[code, old] = CodeChange(code.module, old, new, files)
    return known[code, old]
