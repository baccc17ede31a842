"""The estimate of an experiment's training as a table for people and as JSON for machines."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from implicit_llm_contracts.config.flops import max_evaluations
from implicit_llm_workflow.estimates.cost import Cost, CostModel, Work
from implicit_llm_workflow.estimates.hardware import HARDWARE_FILE
from implicit_llm_workflow.estimates.memory import StepMemory
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.text import MISSING, number_text, plain_table

GB = 1e9
NUMBERS = ("seeds", "tokens", "f-evals", "FLOPs", "hours", "on", "micro-batch", "GiB/GPU", "disk GB")


@dataclass(frozen=True)
class JobEstimate:
    """A training job; `name` is the same for all seeds.

    `is_bound`: the solver may take fewer f-evaluations. `step`: what fits on the card, None if nothing does.
    """

    key: str
    name: str
    work: Work
    cost: Cost
    gpus: int
    card: str
    is_bound: bool
    step: StepMemory | None


def training_estimates(plan: Plan, costs: CostModel) -> list[JobEstimate]:
    """Of all training jobs, in the order of the plan."""
    found = []
    for node in plan.nodes.values():
        if node.stage == "train":
            work, solver, (card, gpus) = costs.work(node), node.config["phase"]["solver"], costs.place(node)
            is_fixed = solver is None or solver.get("mode") == "unrolled"
            is_bound = not is_fixed and work.f_evaluations == max_evaluations(solver)
            name, cost, step = node.seedless_key.removeprefix("train/"), costs.whole(node), costs.step(node)
            found.append(JobEstimate(node.key, name, work, cost, gpus, card, is_bound, step))
    return found


def training_table(jobs: list[JobEstimate]) -> Table:
    """A row for each phase of a run, its seeds together, and the total."""
    table = plain_table("run", *NUMBERS, whole=("run", *NUMBERS), right=NUMBERS)
    for name in dict.fromkeys(job.name for job in jobs):
        table.add_row(name, *_cells([job for job in jobs if job.name == name]))
    sums = _sums(jobs)
    table.add_row(
        "all runs", "", sums["tokens"], "", sums["flops"], sums["hours"], "", "", "", sums["disk"], style="bold"
    )
    return table


def notes(jobs: Iterable[JobEstimate], costs: CostModel) -> Iterator[str]:
    """What the numbers rest on, a line each; only those that apply."""
    hardware, jobs = costs.hardware, list(jobs)
    labels = " ".join(job.step.label for job in jobs if job.step is not None)
    yield "hours: GPU-hours, or CPU-hours of a job that ran on a CPU. -: not known before the job's first run."
    for basis in sorted({job.cost.basis for job in jobs if job.cost.hours is not None}):
        yield f"       {basis}"
    if any(job.cost.is_assumed for job in jobs):
        yield f"       ?: assumed in {HARDWARE_FILE.name}. Run one seed first: its time then counts for the others."
    yield "f-evals: evaluations of the layer stack for a token, those with gradient included."
    if any(job.is_bound for job in jobs):
        yield "       ≤: the most that the solver may take; finished phases replace it by what they took."
    yield f"memory: may fill {hardware.usable_memory:.0%} of a GPU."
    if "r" in labels or "s" in labels:
        yield "       r: with gradient_checkpointing; s: with shard_optimizer."
    if any(job.gpus > 1 for job in jobs):
        yield f"several GPUs: {hardware.scaling_efficiency:.0%} of the throughput each, assumed."


def as_json(jobs: list[JobEstimate], costs: CostModel) -> dict[str, Any]:
    """All jobs one by one, the totals, and what the numbers rest on."""
    return {
        "training": [asdict(job) for job in jobs],
        "totals": {
            "flops": _total(job.work.flops for job in jobs),
            "gpu_hours": _total(job.cost.hours for job in jobs if job.cost.unit == "gpu"),
            "disk_bytes": _total(job.work.disk_bytes for job in jobs),
        },
        "notes": list(notes(jobs, costs)),
    }


def _cells(jobs: list[JobEstimate]) -> list[str]:
    """Cells of jobs that differ in their seed; sums but for what belongs to one job."""
    job, sums = jobs[0], _sums(jobs)
    f_evaluations = max(job.work.f_evaluations for job in jobs)
    return [
        str(len(jobs)),
        sums["tokens"],
        f"{'≤' if any(job.is_bound for job in jobs) else ''}{f_evaluations:.1f}",
        sums["flops"],
        sums["hours"] + ("?" if any(job.cost.is_assumed for job in jobs) else ""),
        f"{job.gpus} x {job.card}" if job.cost.device in (None, job.card) else str(job.cost.device),
        MISSING if job.step is None else job.step.label,
        MISSING if job.step is None else f"{job.step.gib:.1f}",
        sums["disk"],
    ]


def _sums(jobs: list[JobEstimate]) -> dict[str, str]:
    disk = _total(job.work.disk_bytes for job in jobs)
    return {
        "tokens": _short(sum(job.work.tokens for job in jobs)),
        "flops": number_text(_total(job.work.flops for job in jobs), 3),
        "hours": number_text(_total(job.cost.hours for job in jobs), 3),
        "disk": number_text(None if disk is None else disk / GB, 2),
    }


def _short(count: float) -> str:
    """207B for 207e9."""
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if count >= size), ("", 1))
    return f"{count / size:.3g}{unit}"


def _total(values: Iterable[float | None]) -> float | None:
    """The sum of the numbers that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
