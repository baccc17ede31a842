"""The estimate of an experiment as tables for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.table import Table

from implicit_llm_workflow.estimates.data_estimate import DataEstimate, TokenisationRate
from implicit_llm_workflow.estimates.estimate import TrainingEstimate
from implicit_llm_workflow.estimates.evaluation_estimate import EvaluationEstimate
from implicit_llm_workflow.estimates.hardware import Hardware
from implicit_llm_workflow.estimates.throughput import Price

Job = TypeVar("Job")
MISSING = "-"
_MARKS = {"measured": "", "interpolated": "~", "assumed": "?"}
_EVALUATION_MARKS = {"fixed": "", "upper bound": "≤"}


@dataclass(frozen=True)
class Estimate:
    """Of a whole experiment; data by data set and kind of job."""

    training: list[TrainingEstimate]
    evaluation: list[EvaluationEstimate]
    data: list[DataEstimate]


def training_table(estimates: Iterable[TrainingEstimate], hardware: Hardware) -> Table:
    """A row for each phase of a run, its seeds together; totals for each run and in all."""
    estimates = list(estimates)
    cards = list(hardware.cards)
    table = Table(title="Training", title_justify="left", box=None, pad_edge=False)
    for heading in ("run", "phase"):
        table.add_column(heading, no_wrap=True)
    headings = ("seeds", "tokens", "f-evals", "FLOPs", *(f"{card} h" for card in cards), "runs on", "days")
    for heading in (*headings, "micro-batch", "GiB/GPU", "disk GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run, jobs in _grouped(estimates, lambda job: job.run).items():
        for index, same in enumerate(_grouped(jobs, lambda job: (job.phase, job.tokens, job.flops)).values()):
            table.add_row(run if index == 0 else "", *_job_cells(same, cards, hardware))
        if len({job.phase for job in jobs}) > 1:
            table.add_row("", "[bold]in all[/bold]", *_total_cells(jobs, cards))
    table.add_row("[bold]all runs[/bold]", "", *_total_cells(estimates, cards))
    return table


def evaluation_table(estimates: Iterable[EvaluationEstimate], hardware: Hardware) -> Table:
    """A row for each evaluation, over all models."""
    table = Table(title="Evaluation", title_justify="left", box=None, pad_edge=False)
    table.add_column("evaluation")
    for heading in ("jobs", "tokens", "FLOPs", *(f"{card} h" for card in hardware.cards)):
        table.add_column(heading, justify="right")
    for name, jobs in _grouped(estimates, lambda job: job.evaluation).items():
        hours = [_hours(_hours_on(jobs, card)) for card in hardware.cards]
        cells = [str(len(jobs)), _si(_total(job.tokens for job in jobs)), _si(_total(job.flops for job in jobs))]
        marks = ["" if value == MISSING else "?" for value in hours]
        table.add_row(name, *cells, *[hour + mark for hour, mark in zip(hours, marks, strict=True)])
    return table


def data_table(estimates: Iterable[DataEstimate]) -> Table:
    """A row for each data set and kind of job."""
    table = Table(title="Data", title_justify="left", box=None, pad_edge=False)
    table.add_column("data set")
    table.add_column("kind")
    for heading in ("jobs", "tokens", "core hours", "disk GB", "download GB"):
        table.add_column(heading, justify="right")
    for item in estimates:
        table.add_row(
            item.data,
            item.kind,
            str(item.jobs),
            _si(item.tokens),
            _hours(item.core_hours),
            _gb(item.disk_bytes),
            _gb(item.download_bytes),
        )
    return table


def notes(estimates: list[TrainingEstimate], hardware: Hardware, rate: TokenisationRate) -> Iterator[str]:
    """What the numbers rest on, a line each."""
    yield "hours: GPU-hours. No mark: measured steps of this model on this card. ~: interpolated between sizes."
    yield (
        "       ?: assumed, carried over to another card by peak, bandwidth and the factors of "
        "workflow/config/estimate/hardware.yaml."
    )
    yield "       -: the card does not have the precision, or the model is so small that launches are all its time."
    yield "f-evals: evaluations of the layer stack for a token, those with gradient included."
    sources = {estimate.f_evaluations.source for estimate in estimates}
    if "upper bound" in sources:
        yield "       ≤: the most that the solver may take; finished phases replace it by what they took."
    for source in sorted(sources - {"fixed", "upper bound"}):
        yield f"       of {sum(job.f_evaluations.source == source for job in estimates)} jobs: {source}."
    yield f"memory: may fill {hardware.usable_memory:.0%} of a card. r: with gradient checkpointing."
    yield f"several GPUs: {hardware.scaling_efficiency:.0%} of the throughput each (assumed)."
    yield f"tokenisation: {rate.tokens_per_s:,.0f} tokens a second and core ({rate.source})."
    yield (
        "evaluations: as many f-evaluations a token as the training solver may take (assumed); "
        "without sequential modes, which wait for launches."
    )


def as_json(estimate: Estimate, hardware: Hardware, rate: TokenisationRate) -> dict[str, Any]:
    """All jobs one by one, the totals, and what the numbers rest on."""
    training = estimate.training
    return {
        "training": [{**asdict(job), "gpu_hours": job.gpu_hours} for job in training],
        "evaluation": [asdict(job) for job in estimate.evaluation],
        "data": [asdict(item) for item in estimate.data],
        "totals": {
            "flops": _total(job.flops for job in training),
            "gpu_hours": _total(job.gpu_hours for job in training),
            "gpu_hours_by_card": {card: _hours_on(training, card) for card in hardware.cards},
            "disk_bytes": _total(job.disk_bytes for job in training),
        },
        "notes": list(notes(training, hardware, rate)),
    }


def _job_cells(jobs: list[TrainingEstimate], cards: list[str], hardware: Hardware) -> list[str]:
    """Cells of equal jobs that differ in their seed; sums but for what belongs to one job."""
    job = jobs[0]
    step = job.step
    days = None if job.gpu_hours is None else job.gpu_hours / job.gpus / 24
    mark = _EVALUATION_MARKS.get(job.f_evaluations.source, "")
    return [
        job.phase,
        str(len(jobs)),
        _si(job.tokens * len(jobs)),
        f"{mark}{job.f_evaluations.value:.1f}",
        _si(_total(each.flops for each in jobs)),
        *[_price(job.prices[card], len(jobs)) for card in cards],
        f"{job.gpus} x {job.card}",
        MISSING if days is None else _days(days),
        MISSING if step is None else f"{step.micro_batch}{' r' if step.is_recomputed else ''}",
        _memory(job, hardware),
        _gb(_total(each.disk_bytes for each in jobs)),
    ]


def _memory(job: TrainingEstimate, hardware: Hardware) -> str:
    if job.precision not in hardware.card(job.card).peak_tflops:
        return f"[red]no {job.precision}[/red]"
    if job.step is not None:
        return f"{job.step.gib:.1f} of {hardware.card(job.card).memory_gib:g}"
    return MISSING if job.flops is None else "[red]does not fit[/red]"


def _total_cells(jobs: list[TrainingEstimate], cards: list[str]) -> list[str]:
    cells = [
        str(len({job.seed for job in jobs})),
        _si(sum(job.tokens for job in jobs)),
        "",
        _si(_total(job.flops for job in jobs)),
        *[_hours(_hours_on(jobs, card)) for card in cards],
        f"{_hours(_total(job.gpu_hours for job in jobs))} h",
        *[""] * 3,
        _gb(_total(job.disk_bytes for job in jobs)),
    ]
    return [f"[bold]{cell}[/bold]" if cell else "" for cell in cells]


def _hours_on(jobs: Iterable[TrainingEstimate | EvaluationEstimate], card: str) -> float | None:
    return _total(None if price is None else price.gpu_hours for job in jobs for price in [job.prices[card]])


def _price(price: Price | None, count: int) -> str:
    return MISSING if price is None else f"{_hours(price.gpu_hours * count)}{_MARKS[price.basis]}"


def _total(values: Iterable[float | None]) -> float | None:
    """The sum of the numbers that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _grouped(jobs: Iterable[Job], key: Callable[[Job], Any]) -> dict[Any, list[Job]]:
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return groups


def _hours(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _days(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def _gb(value: float | None) -> str:
    return MISSING if value is None else f"{value / 1e9:,.0f}" if value >= 1e10 else f"{value / 1e9:.2g}"


def _si(value: float | None) -> str:
    """Three digits: 207B, 3.1e+22."""
    if value is None:
        return MISSING
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= value < 1e13:
            return f"{value / size:.3g}{unit}" if value / size < 1000 else f"{value / size:,.0f}{unit}"
    return f"{value:.2e}" if value else "0"
