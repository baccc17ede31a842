"""The state of an experiment at a glance, for people and as JSON for machines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow.planning.freed import PAGES
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results import runs_table
from implicit_llm_workflow.results.job_look import LOG, STARTING, STATES, Observed, last_lines
from implicit_llm_workflow.results.lock_holder import Holder
from implicit_llm_workflow.results.runs_table import STATE_STYLE, age_s, step_text
from implicit_llm_workflow.results.shown_numbers import MISSING, number_text, share_text, time_text
from implicit_llm_workflow.results.verify import rebuild_commands

BAR_WIDTH, WIDE_BAR_WIDTH, WIDE = 14, 30, 110
SHOWN_JOBS = 20  # of a state; the others are counted
SHOWN_FAILED = 5


@dataclass(frozen=True)
class Snapshot:
    """State of the jobs at one time. `targets`: keys of the jobs asked for, empty for the whole experiment; `lines`:
    how many to show of a failed job's log; `failed_preflights`: the logs of those."""

    plan: Plan
    jobs: Mapping[str, Observed]
    driver: Holder | None
    targets: tuple[str, ...]
    lines: int = 8
    failed_preflights: Sequence[Path] = ()

    def of(self, *states: str) -> list[Observed]:
        return [job for job in self.jobs.values() if job.state in states]

    def fingerprint(self, key: str) -> str:
        """Of the result that is wanted."""
        return self.plan.identities[key].fingerprint

    @property
    def is_driven(self) -> bool:
        return self.driver is not None and bool(self.driver.is_alive)

    @property
    def is_moving(self) -> bool:
        """Whether anything may still change without somebody who starts something."""
        return self.is_driven or any(job.state in ("running", "queued") for job in self.jobs.values())

    @property
    def is_done(self) -> bool:
        """Whether the targets are there, and nothing is to be made again; what they were made from may be gone."""
        return not self.of("running", "queued", "failed", "stopped", "stale") and all(
            self.jobs[key].state == "done" for key in self.targets or self.jobs
        )


def view(snapshot: Snapshot, width: int) -> RenderableType:
    """All of it; `width`: of what it is printed on, in characters."""
    parts: list[RenderableType] = [Text(driver_text(snapshot)), stage_table(snapshot, width)]
    if running := snapshot.of("running"):
        parts += [Text(), _running_table(running, width)]
    if queued := [job for job in snapshot.of("queued") if job.submitted is not None]:
        parts += [Text(), _queued_table(queued)]
    for log in snapshot.failed_preflights:
        head = Text("failed preflight", style=STATE_STYLE["failed"])
        head.append(f", which all jobs on {log.stem} wait for", style="default")
        parts += [Text(), head, *_log_parts(log, snapshot.lines)]
    failed = snapshot.of("failed")
    for job in failed[:SHOWN_FAILED]:
        parts += [Text(), *_failed_parts(snapshot, job)]
    if len(failed) > SHOWN_FAILED:
        parts.append(Text(f"and {_names(failed[SHOWN_FAILED:])}"))
    if stopped := snapshot.of("stopped"):
        parts += [Text(), Text(f"stopped, to be continued: {_names(stopped)}")]
    return Group(*parts)


def last_words(snapshot: Snapshot) -> Text:
    """What is stale and who says why, and what to type next."""
    lines = [f"next: {next_step(snapshot)}"]
    if stale := snapshot.of("stale"):
        why = f"implicit-llm explain --config {snapshot.plan.experiment.source}"
        lines.insert(0, f"{len(stale):,} stale: `{why}` says why, and what making them again takes")
    return Text("\n".join(["", *lines]))


def one_line(snapshot: Snapshot) -> str:
    """How many jobs are in which state."""
    counts: Counter[str] = Counter(job.state for job in snapshot.jobs.values())
    driver = "driver lives" if snapshot.is_driven else "no driver"
    return ", ".join([*(f"{counts[state]:,} {state}" for state in STATES if counts[state]), driver])


def driver_text(snapshot: Snapshot) -> str:
    """Whether a Snakemake works on the experiment."""
    name, driver = snapshot.plan.experiment.name, snapshot.driver
    if driver is None:
        return f"{name}: no driver has worked on it yet"
    if not driver.is_alive:
        return f"{name}: no driver lives on this machine (the last one was process {driver.pid})"
    lock = snapshot.plan.root / ".driver.lock"
    return f"{name}: driver is process {driver.pid}, since {time_text(time.time() - lock.stat().st_mtime)}"


def stage_table(snapshot: Snapshot, width: int) -> Table:
    """A row for each stage; only states that occur have a column."""
    counts: dict[str, Counter[str]] = {}
    for job in snapshot.jobs.values():
        counts.setdefault(job.node.stage, Counter())[job.state] += 1
    shown = [state for state in STATES if state != "done" and any(row[state] for row in counts.values())]
    table = Table("stage", "", box=None, pad_edge=False)
    for heading in ("done", "of", *shown):
        table.add_column(heading, justify="right", no_wrap=True)
    bar_width = WIDE_BAR_WIDTH if width >= WIDE else BAR_WIDTH
    for stage, row in counts.items():
        bar = ProgressBar(total=row.total(), completed=row["done"], width=bar_width, finished_style="green")
        cells = [_count(row[state], STATE_STYLE[state]) for state in shown]
        table.add_row(stage, bar, _count(row["done"], STATE_STYLE["done"]), f"{row.total():,}", *cells)
    return table


def job_table(snapshot: Snapshot) -> Table:
    """A row for each job."""
    table = Table("job", "state", "fingerprint", "why", box=None, pad_edge=False)
    for key, job in snapshot.jobs.items():
        state = f"[{STATE_STYLE[job.state]}]{job.state}[/{STATE_STYLE[job.state]}]"
        table.add_row(key, state, snapshot.fingerprint(key)[:FINGERPRINT_DIGITS], escape(job.why))
    return table


def next_step(snapshot: Snapshot) -> str:
    """What to type, or that there is nothing to type."""
    plan = snapshot.plan
    if snapshot.is_done:
        pages = [
            plan.root / key / "index.html"
            for key in snapshot.targets or snapshot.jobs
            if plan.nodes[key].stage in PAGES
        ]
        gone = len(snapshot.of("waiting"))
        absent = [f"{gone:,} results that it was made from are gone and not needed"] if gone else []
        return "; ".join(["nothing, all is done", *map(str, pages), *absent])
    if snapshot.is_driven:
        more = "; it leaves out what failed" if snapshot.of("failed") else ""
        return f"nothing to type, the driver goes on{more}"
    if snapshot.of("running"):
        return "jobs run without a driver; the same command as before takes them over: " + _command(snapshot)
    if damaged := damaged_inputs(snapshot):
        return " && ".join(rebuild_commands(plan, damaged, snapshot.targets))
    return _command(snapshot)


def damaged_inputs(snapshot: Snapshot) -> list[str]:
    """Jobs with files that a failed job refused to read; its error names their manifest as the one to remove."""
    plan = snapshot.plan
    return [
        key
        for key in dict.fromkeys(key for job in snapshot.of("failed") for key in job.node.upstream.values())
        if Path(plan.manifest(plan.nodes[key])).exists()
        and any(f"{plan.root.name}/{key}/{MANIFEST}" in job.why for job in snapshot.of("failed"))
    ]


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Counts by stage, and each job."""
    stages: dict[str, dict[str, int]] = {}
    for job in snapshot.jobs.values():
        row = stages.setdefault(job.node.stage, dict.fromkeys(STATES, 0))
        row[job.state] += 1
    return {
        "experiment": snapshot.plan.experiment.name,
        "driver": None if snapshot.driver is None else {"pid": snapshot.driver.pid, "is_alive": snapshot.is_driven},
        "stages": stages,
        "failed_preflights": {log.stem: str(log) for log in snapshot.failed_preflights},
        "jobs": [_job_values(snapshot, job) for job in snapshot.jobs.values()],
        "next": next_step(snapshot),
    }


def _job_values(snapshot: Snapshot, job: Observed) -> dict[str, Any]:
    values = {
        "stage": job.node.stage,
        "fingerprint": snapshot.fingerprint(job.node.key),
        **runs_table.as_json(job),
        "doing": job.doing or None,
    }
    if job.state == "failed":
        values |= {"log": str(_log_of(snapshot, job)), "last_lines": last_lines(_log_of(snapshot, job), snapshot.lines)}
    return values


def _running_table(jobs: list[Observed], width: int) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=width < WIDE)
    table.add_column("running", overflow="fold", min_width=16)
    for heading in ("step", "", "rate", "left", "wrote", "job"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("now", overflow="ellipsis", no_wrap=True)
    for job in jobs[:SHOWN_JOBS]:
        progress = job.progress
        table.add_row(
            escape(job.node.key),
            step_text(job),
            share_text(progress.share) if progress.share is not None else "",
            _rate_text(progress.steps_per_s),
            time_text(progress.remaining_s),
            f"{time_text(age_s(job))} ago" if job.unix_s is not None and job.doing != STARTING else MISSING,
            _job_id(job),
            escape(_now(job)),
        )
    if len(jobs) > SHOWN_JOBS:
        table.add_row(f"and {len(jobs) - SHOWN_JOBS:,} more")
    return table


def _queued_table(jobs: list[Observed]) -> Table:
    table = Table("queued", "job", "reason", box=None, pad_edge=False)
    for job in jobs[:SHOWN_JOBS]:
        table.add_row(escape(job.node.key), _job_id(job), escape(job.why or MISSING))
    if len(jobs) > SHOWN_JOBS:
        table.add_row(f"and {len(jobs) - SHOWN_JOBS:,} more")
    return table


def _failed_parts(snapshot: Snapshot, job: Observed) -> Iterator[RenderableType]:
    head = Text("failed ", style=STATE_STYLE["failed"])
    head.append(f"{job.node.key}", style="bold")
    facts = [f"class {job.failure_class or 'not known'}"]
    if job.submitted is not None and job.submitted.job_id:
        facts.append(f"job {_job_id(job)}")
    if job.unix_s is not None:
        facts.append(f"{time_text(age_s(job))} ago")
    head.append(f" ({', '.join(facts)})", style="not bold default")
    yield head
    if job.why:
        yield Padding(Text(job.why), (0, 0, 0, 2), expand=False)
    if advice := _advice(job.failure_class):
        yield Padding(Text(f"advice: {advice}"), (0, 0, 0, 2), expand=False)
    yield from _log_parts(_log_of(snapshot, job), snapshot.lines)


def _log_parts(log: Path, number: int) -> Iterator[RenderableType]:
    lines = last_lines(log, number)
    yield Padding(
        Text(f"{'the end of ' if lines else 'no '}{log}{':' if lines else ''}", style="dim"), (0, 0, 0, 2), expand=False
    )
    if lines:
        yield Padding(Text("\n".join(lines), style="dim"), (0, 0, 0, 4), expand=False)


def _log_of(snapshot: Snapshot, job: Observed) -> Path:
    """The job's own log; what it printed where it did not come to write one."""
    log = snapshot.plan.run_dir(job.node) / LOG
    return job.submitted.output_log if job.submitted is not None and not last_lines(log, 1) else log


def _advice(failure_class: str | None) -> str:
    if failure_class is None:
        return ""
    from snakemake_executor_plugin_submitit.records import ADVICE

    return ADVICE.get(failure_class, "")


def _command(snapshot: Snapshot) -> str:
    """The snakemake that makes the targets, with the profile that was in use."""
    return snapshot.plan.command_for(snapshot.plan.nodes[key] for key in snapshot.targets)


def _now(job: Observed) -> str:
    """Loss and residual of a training job, of others what they last wrote into the log."""
    if job.why or job.doing == STARTING or "loss" not in job.metrics:
        return job.why or job.doing.removeprefix(f"{job.node.name}: ")
    parts = [f"loss {number_text(job.metrics['loss'])}"]
    if "residual" in job.metrics:
        parts.append(f"residual {number_text(job.metrics['residual'], 2)}")
    return ", ".join(parts)


def _job_id(job: Observed) -> str:
    submitted = job.submitted
    if submitted is not None and submitted.job_id:
        kind = "slurm" if submitted.cluster == "slurm" else "process"
        return f"{kind} {submitted.job_id}" + (f" on {job.where}" if job.where and submitted.nodes else "")
    return f"on {job.where}" if job.where else MISSING


def _rate_text(steps_per_s: float | None) -> str:
    if steps_per_s is None:
        return MISSING
    return f"{steps_per_s:.1f} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.1f} s/step"


def _names(jobs: Iterable[Observed]) -> str:
    keys = [job.node.key for job in jobs]
    more = f" and {len(keys) - SHOWN_FAILED:,} more" if len(keys) > SHOWN_FAILED else ""
    return ", ".join(keys[:SHOWN_FAILED]) + more


def _count(number: int, style: str) -> str:
    return f"[{style}]{number:,}[/{style}]" if number else "[dim]0[/dim]"
