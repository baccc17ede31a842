"""The estimate of an experiment as tables for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from implicit_llm_contracts.config.flops import max_evaluations
from implicit_llm_workflow.estimates.cost import Cost, CostModel, Work
from implicit_llm_workflow.estimates.hardware import HARDWARE_FILE
from implicit_llm_workflow.estimates.memory import StepMemory
from implicit_llm_workflow.planning.plan import Plan

MISSING = "-"
GB = 1e9


@dataclass(frozen=True)
class JobEstimate:
    """One job. `name` and `part`: run and phase of a training job, corpus and kind of a data job.

    `is_bound`: the solver may take fewer f-evaluations. `step`: what fits on the card, None if nothing does.
    """

    key: str
    name: str
    part: str
    seed: int | None
    work: Work
    cost: Cost
    gpus: int = 1
    card: str | None = None
    is_bound: bool = False
    step: StepMemory | None = None


def training_estimates(plan: Plan, costs: CostModel) -> list[JobEstimate]:
    """Of all training jobs, in the order of the plan."""
    found = []
    for node in plan.nodes.values():
        if node.stage == "train":
            work, solver, (card, gpus) = costs.work(node), node.config["phase"]["solver"], costs.place(node)
            is_fixed = solver is None or solver.get("mode") == "unrolled"
            is_bound = not is_fixed and work.f_evaluations == max_evaluations(solver)
            name, phase, step = node.run or node.name, node.config["phase"]["name"], costs.step(node)
            cost = costs.whole(node)
            found.append(JobEstimate(node.key, name, phase, node.seed, work, cost, gpus, card, is_bound, step))
    return found


def data_estimates(plan: Plan, costs: CostModel) -> list[JobEstimate]:
    """Of the jobs that tokenise a corpus of known size."""
    nodes = [node for node in plan.nodes.values() if node.stage == "data"]
    jobs = [(node, costs.work(node)) for node in nodes]
    return [
        JobEstimate(node.key, node.config["corpus"]["dataset"], node.config["kind"], None, work, costs.whole(node))
        for node, work in jobs
        if work.tokens is not None
    ]


def training_table(jobs: list[JobEstimate]) -> Table:
    """A row for each phase of a run, its seeds together; totals for each run and in all."""
    headings = ("seeds", "tokens", "f-evals", "FLOPs", "hours", "on", "days", "micro-batch", "GiB/GPU", "disk GB")
    table = _table("Training", ("run", "phase"), headings)
    for run, of_run in _grouped(jobs, lambda job: job.name).items():
        phases = _grouped(of_run, lambda job: (job.part, job.work, job.cost.basis, job.cost.device))
        for index, same in enumerate(phases.values()):
            table.add_row(run if index == 0 else "", *_phase_cells(same))
        if len({job.part for job in of_run}) > 1:
            table.add_row("", "in all", *_total_cells(of_run), style="bold")
    table.add_row("all runs", "", *_total_cells(jobs), style="bold")
    return table


def data_table(jobs: Iterable[JobEstimate]) -> Table:
    """A row for each corpus; it is downloaded once, for all its shards."""
    table = _table("Tokenisation", ("corpus",), ("jobs", "tokens", "core hours", "disk GB", "download GB"))
    for name, shards in _grouped(jobs, lambda job: job.name).items():
        tokens, hours = _total(job.work.tokens for job in shards), _total(job.cost.hours for job in shards)
        disk = _total(job.work.disk_bytes for job in shards)
        sizes = (_short(disk, GB), _short(shards[0].work.download_bytes, GB))
        table.add_row(name, str(len(shards)), _short(tokens), _short(hours), *sizes)
    return table


def notes(jobs: Iterable[JobEstimate], costs: CostModel) -> Iterator[str]:
    """What the numbers rest on, a line each."""
    hardware = costs.hardware
    yield "hours: GPU-hours; of a job that ran on a CPU its hours. -: not known before a first run, as of evaluations."
    for basis in sorted({job.cost.basis for job in jobs if job.cost.hours is not None}):
        yield f"       {basis}"
    yield f"       ?: assumed in {HARDWARE_FILE.name}. Run one seed first: its time then counts for the others."
    yield "f-evals: evaluations of the layer stack for a token, those with gradient included."
    yield "       ≤: the most that the solver may take; finished phases replace it by what they took."
    yield f"memory: may fill {hardware.usable_memory:.0%} of a GPU. r: gradient_checkpointing, s: shard_optimizer."
    yield f"several GPUs: {hardware.scaling_efficiency:.0%} of the throughput each, assumed."


def as_json(training: list[JobEstimate], data: list[JobEstimate], costs: CostModel) -> dict[str, Any]:
    """All jobs one by one, the totals, and what the numbers rest on."""
    return {
        "training": [asdict(job) for job in training],
        "data": [asdict(job) for job in data],
        "totals": {
            "flops": _total(job.work.flops for job in training),
            "gpu_hours": _total(job.cost.hours for job in training if job.cost.unit == "gpu"),
            "disk_bytes": _total(job.work.disk_bytes for job in training),
        },
        "notes": list(notes(training, costs)),
    }


def _table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _phase_cells(jobs: list[JobEstimate]) -> list[str]:
    """Cells of equal jobs that differ in their seed; sums but for what belongs to one job."""
    job, count = jobs[0], len(jobs)
    work, step = job.work, job.step
    hours = job.cost.hours
    return [
        job.part,
        str(count),
        _short(_total(each.work.tokens for each in jobs)),
        f"{'≤' if job.is_bound else ''}{work.f_evaluations:.1f}",
        _short(_total(each.work.flops for each in jobs)),
        _short(_total(each.cost.hours for each in jobs)) + ("?" if job.cost.is_assumed else ""),
        f"{job.gpus} x {job.card}" if job.cost.device in (None, job.card) else str(job.cost.device),
        MISSING if hours is None else f"{hours / job.gpus / 24:,.2f}",
        MISSING if step is None else step.label,
        MISSING if step is None else f"{step.gib:.1f}",
        _short(_total(each.work.disk_bytes for each in jobs), GB),
    ]


def _total_cells(jobs: list[JobEstimate]) -> list[str]:
    sums = [_short(_total(values)) for values in ((job.work.tokens for job in jobs), (job.work.flops for job in jobs))]
    hours = _short(_total(job.cost.hours for job in jobs))
    disk = _short(_total(job.work.disk_bytes for job in jobs), GB)
    return [str(len({job.seed for job in jobs})), sums[0], "", sums[1], hours, "", "", "", "", disk]


def _total(values: Iterable[float | None]) -> float | None:
    """The sum of the numbers that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _grouped(jobs: Iterable[JobEstimate], key: Callable[[JobEstimate], Any]) -> dict[Any, list[JobEstimate]]:
    groups: dict[Any, list[JobEstimate]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return groups


def _short(value: float | None, unit: float = 1.0) -> str:
    """Two or three digits: 0.12, 61,234, 207B, 3.1e+22."""
    if value is None:
        return MISSING
    value /= unit
    if value < 1e5:
        return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    for name, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= value < 1e13:
            return f"{value / size:,.0f}{name}" if value >= 1000 * size else f"{value / size:.3g}{name}"
    return f"{value:.2e}"
