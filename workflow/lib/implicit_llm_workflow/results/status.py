"""The state of an experiment at a glance and its jobs in tables, for people and as JSON for machines."""

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

from implicit_llm_contracts.runs.manifest import MANIFEST
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_contracts.runs.run_directory import LOG
from implicit_llm_workflow.estimates.cost import UNNAMED_HOURS, CostModel
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import PAGES
from implicit_llm_workflow.project_dirs import LOCAL_PROFILE
from implicit_llm_workflow.results.job_states import (
    STARTING,
    STATES,
    Holder,
    JobView,
    driver_of,
    failed_preflights,
    last_lines,
    observe,
)
from implicit_llm_workflow.results.verify import rebuild_commands
from implicit_llm_workflow.text import MISSING, plain_table, share_text, time_text

BAR_WIDTH = 20
SHOWN_JOBS, SHOWN_FAILED = 20, 5  # the others are counted


@dataclass(frozen=True)
class Snapshot:
    """State of the jobs at one time. `targets`: keys of the jobs asked for, empty for the whole experiment; `lines`:
    how many to show of a failed job's log; `failed_preflights`: their logs."""

    plan: Plan
    jobs: Mapping[str, JobView]
    driver: Holder | None
    targets: tuple[str, ...]
    lines: int
    failed_preflights: Sequence[Path]

    @classmethod
    def take(cls, plan: Plan, keys: Iterable[str], targets: tuple[str, ...], lines: int) -> Snapshot:
        """Look at the jobs of `keys`."""
        return cls(plan, observe(plan, keys), driver_of(plan), targets, lines, failed_preflights(plan))

    def of(self, *states: str) -> list[JobView]:
        return [job for job in self.jobs.values() if job.state in states]

    @property
    def is_driven(self) -> bool:
        return self.driver is not None and bool(self.driver.is_alive)

    @property
    def is_done(self) -> bool:
        """Whether the targets are there, and nothing is to be made again; their inputs may be gone."""
        return not self.of("running", "queued", "failed", "stopped", "stale") and all(
            self.jobs[key].state == "done" for key in self.targets or self.jobs
        )

    @property
    def command(self) -> str:
        """The snakemake that makes the targets, with the profile that was in use."""
        return self.plan.command_for(self.plan.nodes[key] for key in self.targets)


def view(snapshot: Snapshot) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [Text(headline(snapshot)), stage_table(snapshot)]
    submitted = [job for job in snapshot.of("queued") if job.submitted is not None]
    if active := [*snapshot.of("running"), *submitted]:
        parts += [Text(), _active_table(active)]
    for log in snapshot.failed_preflights:
        head = Text.assemble(("failed preflight", STATES["failed"]), f", which all jobs on {log.stem} wait for")
        parts += [Text(), head, *_log_parts(log, snapshot.lines)]
    failed = snapshot.of("failed")
    for job in failed[:SHOWN_FAILED]:
        parts += [Text(), *_failed_parts(snapshot, job)]
    for what, jobs in (("and", failed[SHOWN_FAILED:]), ("stopped, to be continued:", snapshot.of("stopped"))):
        if jobs:
            more = f" and {len(jobs) - SHOWN_FAILED:,} more" if len(jobs) > SHOWN_FAILED else ""
            parts += [Text(), Text(f"{what} {', '.join(job.node.key for job in jobs[:SHOWN_FAILED])}{more}")]
    return Group(*parts)


def headline(snapshot: Snapshot) -> str:
    """How many jobs are done or in another state, and whether a Snakemake works on the experiment."""
    text = "no driver"
    if snapshot.driver is not None and snapshot.is_driven:
        since = time.time() - snapshot.plan.driver_lock.stat().st_mtime
        text = f"driver is process {snapshot.driver.pid}, since {time_text(since)}"
    counts: Counter[str] = Counter(job.state for job in snapshot.jobs.values())
    others = [f"{counts[state]:,} {state}" for state in STATES if state != "done" and counts[state]]
    done = f"{counts['done']:,} of {counts.total():,} jobs done"
    return f"{snapshot.plan.experiment.name}: {', '.join([done, *others])}; {text}"


def last_words(snapshot: Snapshot) -> str:
    """Return what is stale, the command that says why, and what to type next."""
    lines = [f"next: {next_step(snapshot)}"]
    if stale := snapshot.of("stale"):
        why = f"implicit-llm explain {snapshot.plan.argument}"
        lines.insert(0, f"{len(stale):,} stale: `{why}` says why, and what making them again takes")
    return "\n".join(["", *lines])


def next_step(snapshot: Snapshot) -> str:
    """Return what to type, or that there is nothing to type."""
    plan = snapshot.plan
    if snapshot.is_done:
        pages = [key for key in snapshot.targets or snapshot.jobs if plan.nodes[key].stage in PAGES]
        gone = len(snapshot.of("waiting"))
        absent = [f"{gone:,} of its inputs are gone and not needed"] if gone else []
        return "; ".join(["nothing, all is done", *(str(plan.root / key / "index.html") for key in pages), *absent])
    if snapshot.is_driven:
        more = "; it leaves out what failed" if snapshot.of("failed") else ""
        more += "; what it leaves stopped is resumed by the next start" if snapshot.of("stopped") else ""
        return f"nothing to type, the driver goes on{more}"
    if snapshot.of("running"):
        return f"jobs run without a driver; the same command as before takes them over: {snapshot.command}"
    if damaged := _damaged_inputs(snapshot):
        return " && ".join(rebuild_commands(plan, damaged, snapshot.targets))
    return f"{snapshot.command}{'' if snapshot.targets else _price(plan)}"


def _price(plan: Plan) -> str:
    """Return the GPU-hours of the experiment, if it would take days of a GPU on this machine."""
    hours = CostModel(plan).training_hours if plan.profile == LOCAL_PROFILE else 0
    return f"  # {hours:,.0f} GPU-hours by estimate, on this machine" if hours > UNNAMED_HOURS else ""


def _damaged_inputs(snapshot: Snapshot) -> list[str]:
    """Jobs with files that a failed job refused to read; its error names their manifest as the one to remove."""
    failed, plan = snapshot.of("failed"), snapshot.plan
    errors = " ".join(job.why for job in failed)
    inputs = dict.fromkeys(key for job in failed for key in job.node.upstream.values())
    is_named = {key: f"{plan.root.name}/{key}/{MANIFEST}" in errors for key in inputs}
    return [key for key in inputs if is_named[key] and (plan.root / key / MANIFEST).exists()]


def stage_table(snapshot: Snapshot) -> Table:
    """A row for each stage; only states that occur have a column."""
    stages = _counts_by_stage(snapshot)
    shown = [state for state in STATES if state != "done" and any(row[state] for row in stages.values())]
    right = ("done", "of", *shown)
    table = plain_table("stage", "", *right, whole=right, right=right)
    for stage, row in stages.items():
        bar = ProgressBar(total=row.total(), completed=row["done"], width=BAR_WIDTH, finished_style="green")
        cells = [Text(f"{row[state]:,}", STATES[state] if row[state] else "dim") for state in ("done", *shown)]
        table.add_row(stage, bar, cells[0], f"{row.total():,}", *cells[1:])
    return table


def job_table(snapshot: Snapshot) -> Table:
    """A row for each job; only metrics that some job has get a column."""
    jobs = snapshot.jobs.values()
    metrics = [item for item in METRICS.values() if item.is_column and any(item.key in job.metrics for job in jobs)]
    right = ["step", *(item.head for item in metrics), "age"]
    table = plain_table("job", "state", *right, "why", whole=("state", *right), right=right)
    for job in jobs:
        numbers = [item.text(job.metrics[item.key]) if item.key in job.metrics else MISSING for item in metrics]
        cells = [_step_text(job), *numbers, time_text(job.age_s), escape(job.why)]
        table.add_row(job.node.key, Text(job.state, STATES[job.state]), *cells)
    return table


def _active_table(jobs: list[JobView]) -> Table:
    """A row for each running or submitted job, with what it does, or the reason why it waits."""
    right = ("step", "", "rate", "left", "wrote", "job")
    table = plain_table("active", *right, whole=right, right=right, collapse_padding=True)
    table.columns[0].min_width = 16
    table.add_column("now", overflow="ellipsis", no_wrap=True)
    for job in jobs[:SHOWN_JOBS]:
        progress, has_written = job.progress, job.age_s is not None and job.doing != STARTING
        table.add_row(
            escape(job.node.key),
            _step_text(job),
            share_text(progress.share) if progress.share is not None else "",
            _rate_text(progress.steps_per_s),
            time_text(progress.remaining_s),
            f"{time_text(job.age_s)} ago" if has_written else MISSING,
            _job_id(job),
            escape(_now(job)),
        )
    if len(jobs) > SHOWN_JOBS:
        table.add_row(f"and {len(jobs) - SHOWN_JOBS:,} more")
    return table


def _failed_parts(snapshot: Snapshot, job: JobView) -> Iterator[RenderableType]:
    from snakemake_executor_plugin_submitit.records import ADVICE

    facts = [f"class {job.failure_class or 'not known'}"]
    facts += [f"job {_job_id(job)}"] if job.submitted is not None and job.submitted.job_id else []
    facts += [f"{time_text(job.age_s)} ago"] if job.unix_s is not None else []
    yield Text.assemble(("failed ", STATES["failed"]), (job.node.key, "bold"), f" ({', '.join(facts)})")
    advice = ADVICE.get(job.failure_class or "")
    for line in (job.why, f"advice: {advice}" if advice else ""):
        if line:
            yield Padding(Text(line), (0, 0, 0, 2), expand=False)
    yield from _log_parts(_log_of(snapshot, job), snapshot.lines)


def _log_parts(log: Path, number: int) -> Iterator[RenderableType]:
    lines = last_lines(log, number)
    yield Padding(Text(f"the end of {log}:" if lines else f"no {log}", style="dim"), (0, 0, 0, 2), expand=False)
    if lines:
        yield Padding(Text("\n".join(lines), style="dim"), (0, 0, 0, 4), expand=False)


def _log_of(snapshot: Snapshot, job: JobView) -> Path:
    """The job's own log; its output if it did not come to write one."""
    log = Path(snapshot.plan.manifest(job.node)).with_name(LOG)
    return job.submitted.output_log if job.submitted is not None and not last_lines(log, 1) else log


def _step_text(job: JobView) -> str:
    """ "450/1200", both counted from the beginning of the curriculum."""
    step, end = job.progress.step, job.progress.end_step
    shown = MISSING if step is None else str(step)
    return shown if end is None else f"{shown}/{end}"


def _now(job: JobView) -> str:
    """Loss and residual of a training job, of others the last line of their log; why a job is queued."""
    if job.why or job.doing == STARTING or "loss" not in job.metrics:
        return job.why or job.doing.removeprefix(f"{job.node.name}: ")
    shown = [METRICS[key] for key in ("loss", "residual") if key in job.metrics]
    return ", ".join(f"{item.head} {item.text(job.metrics[item.key])}" for item in shown)


def _job_id(job: JobView) -> str:
    submitted, where = job.submitted, f"on {job.where}" if job.where else ""
    if submitted is None or not submitted.job_id:
        return where or MISSING
    kind = "slurm" if submitted.cluster == "slurm" else "process"
    return f"{kind} {submitted.job_id} {where if submitted.nodes else ''}".rstrip()


def _rate_text(steps_per_s: float | None) -> str:
    if steps_per_s is None:
        return MISSING
    return f"{steps_per_s:.1f} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.1f} s/step"


def _counts_by_stage(snapshot: Snapshot) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for job in snapshot.jobs.values():
        found.setdefault(job.node.stage, Counter())[job.state] += 1
    return found


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Counts by stage, and each job."""
    stages = _counts_by_stage(snapshot)
    return {
        "experiment": snapshot.plan.experiment.name,
        "driver": None if snapshot.driver is None else {"pid": snapshot.driver.pid, "is_alive": snapshot.is_driven},
        "stages": {stage: {state: row[state] for state in STATES} for stage, row in stages.items()},
        "failed_preflights": {log.stem: log for log in snapshot.failed_preflights},
        "jobs": [_job_values(snapshot, job) for job in snapshot.jobs.values()],
        "next": next_step(snapshot),
    }


def _job_values(snapshot: Snapshot, job: JobView) -> dict[str, Any]:
    """Everything that is known of one job."""
    node = job.node
    known = {key: value for key, value in vars(job).items() if key not in ("node", "result", "runs", "code", "cost")}
    values = {
        "job": node.key,
        "stage": node.stage,
        "fingerprint": snapshot.plan.identities[node.key].fingerprint,
        **known,
        "age_s": job.age_s,
    }
    if job.state == "failed":
        log = _log_of(snapshot, job)
        values |= {"log": log, "last_lines": last_lines(log, snapshot.lines)}
    return values
