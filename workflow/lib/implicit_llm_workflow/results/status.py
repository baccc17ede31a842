"""Show the state of an experiment and its jobs, as tables for people and as JSON for programs."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from implicit_llm_contracts.runs.manifest import MANIFEST
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_contracts.runs.run_directory import LOG
from implicit_llm_workflow.estimates import UNNAMED_HOURS, CostModel
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import PAGES
from implicit_llm_workflow.project_dirs import LOCAL_PROFILE
from implicit_llm_workflow.results.job_states import (
    STARTING,
    STATES,
    JobView,
    failed_preflights,
    holder_of,
    last_lines,
    observe,
    state_text,
)
from implicit_llm_workflow.results.verify import rebuild_commands
from implicit_llm_workflow.text import MISSING, plain_table, share_text, time_text
from snakemake_executor_plugin_submitit.records import ADVICE

BAR_WIDTH = 20
SHOWN_JOBS, SHOWN_FAILED = 20, 5  # further jobs are only counted


class Snapshot:
    """The state of the jobs of `keys` at one time.

    `stages`: the number of jobs in each state, by stage. `targets`: the keys of the jobs that the user named; empty for
    the whole experiment. `lines`: the number of log lines to show for a failed job or preflight. `driver`: the driver
    that holds the lock of the experiment or held it last; None if there was none, or if `gc` or `accept` came after it.
    `failed_preflights`: empty while this process is alive.
    """

    def __init__(self, plan: Plan, keys: Iterable[str], targets: Sequence[str], lines: int) -> None:
        self.plan, self.targets, self.lines = plan, targets, lines
        self.jobs, self.driver = observe(plan, keys), holder_of(plan.driver_lock)
        self.stages: dict[str, Counter[str]] = {}
        for job in self.jobs.values():
            self.stages.setdefault(job.node.stage, Counter())[job.state] += 1
        self.is_driven = self.driver is not None and bool(self.driver.is_alive)
        # A driver may be running the preflights now.
        self.failed_preflights = [] if self.is_driven else failed_preflights(plan)

    def of(self, *states: str) -> list[JobView]:
        return [job for job in self.jobs.values() if job.state in states]

    @property
    def is_done(self) -> bool:
        """Whether the targets, or else all jobs, are done and no job must run; inputs of targets may be gone."""
        return not self.of("running", "queued", "failed", "stopped", "stale") and all(
            self.jobs[key].state == "done" for key in self.targets or self.jobs
        )

    @property
    def command(self) -> str:
        """The Snakemake command that makes the targets, with the profile of the last driver."""
        return self.plan.command_for(self.plan.nodes[key] for key in self.targets)


def view(snapshot: Snapshot) -> Iterator[RenderableType]:
    """Yield the parts of the output before its last words, from the headline to the stopped jobs; cut long lists."""
    yield Text(headline(snapshot))
    yield stage_table(snapshot)
    submitted = [job for job in snapshot.of("queued") if job.submitted is not None]
    if active := [*snapshot.of("running"), *submitted]:
        yield from (Text(), _active_table(active))
    for check in snapshot.failed_preflights:
        head = Text.assemble(("failed preflight", STATES["failed"]), f", which all jobs on {check.hardware} wait for")
        yield from (Text(), head)
        if check.why:
            yield _indented(check.why, 2)
        yield from _log_parts(check.log, snapshot.lines)
    failed = snapshot.of("failed")
    for job in failed[:SHOWN_FAILED]:
        yield from (Text(), *_failed_parts(snapshot, job))
    for what, jobs in (("and", failed[SHOWN_FAILED:]), ("stopped, to be continued:", snapshot.of("stopped"))):
        if jobs:
            more = f" and {len(jobs) - SHOWN_FAILED:,} more" if len(jobs) > SHOWN_FAILED else ""
            yield Text(f"\n{what} {', '.join(job.node.key for job in jobs[:SHOWN_FAILED])}{more}")


def headline(snapshot: Snapshot) -> str:
    """Return a line with the number of jobs in each state, and the driver if one is or may be alive."""
    text = "no driver"
    if snapshot.driver is not None and snapshot.driver.is_alive is None:
        text = f"process {snapshot.driver.pid} on {snapshot.driver.host} was the last driver, and may still run"
    if snapshot.driver is not None and snapshot.is_driven:
        since = time.time() - snapshot.plan.driver_lock.stat().st_mtime
        text = f"driver is process {snapshot.driver.pid}, since {time_text(since)}"
        text += ", and starts no more jobs" if snapshot.plan.is_driver_stopping else ""
    counts: Counter[str] = Counter(job.state for job in snapshot.jobs.values())
    others = (f", {counts[state]:,} {state}" for state in STATES if state != "done" and counts[state])
    done = f"{counts['done']:,} of {counts.total():,} jobs done"
    return f"{snapshot.plan.experiment.name}: {done}{''.join(others)}; {text}"


def last_words(snapshot: Snapshot) -> str:
    """Return the number of stale jobs with the command that explains them, and the next step for the user."""
    why = f"`implicit-llm explain {snapshot.plan.argument}` says why, and what making them again takes"
    lines = [f"{len(stale):,} stale: {why}"] if (stale := snapshot.of("stale")) else []
    return "\n".join(["", *lines, f"next: {next_step(snapshot)}"])


def next_step(snapshot: Snapshot) -> str:
    """Return the command to type next, or the reason why there is none."""
    plan = snapshot.plan
    if snapshot.is_done:
        keys = [key for key in snapshot.targets or snapshot.jobs if plan.nodes[key].stage in PAGES]
        pages = "".join(f"; {plan.page(plan.nodes[key])}" for key in keys)
        gone = len(snapshot.of("waiting"))
        return f"nothing, all is done{pages}{f'; {gone:,} of its inputs are gone and not needed' if gone else ''}"
    if snapshot.is_driven and plan.is_driver_stopping:
        return f"the driver was told to stop; when its running jobs have ended, type: {snapshot.command}"
    if snapshot.is_driven:
        more = "; it leaves out what failed" if snapshot.of("failed") else ""
        more += "; what it leaves stopped is resumed by the next start" if snapshot.of("stopped") else ""
        return f"nothing to type, the driver goes on{more}"
    if snapshot.driver is not None and snapshot.driver.is_alive is None:
        who = f"process {snapshot.driver.pid} still runs on {snapshot.driver.host}"
        return f"nothing while {who}, which is not visible here; after its end, type: {snapshot.command}"
    if running := snapshot.of("running"):
        if any(job.submitted is None for job in running):  # only the executor's jobs can be taken over
            return f"jobs run without a driver; when they have ended, type: {snapshot.command}"
        return f"jobs run without a driver; the same command as before takes them over: {snapshot.command}"
    if damaged := _damaged_inputs(snapshot):
        return " && ".join(rebuild_commands(plan, damaged, snapshot.targets))
    hours = CostModel(plan).training_hours if plan.profile == LOCAL_PROFILE and not snapshot.targets else 0
    price = f"  # {hours:,.0f} hours of training by estimate, on this machine" if hours > UNNAMED_HOURS else ""
    return f"{snapshot.command}{price}"


def _damaged_inputs(snapshot: Snapshot) -> list[str]:
    """Return the inputs that failed jobs refused as damaged: their errors name the manifest of the input."""
    failed, root = snapshot.of("failed"), snapshot.plan.root
    errors = " ".join(job.why for job in failed)
    inputs = dict.fromkeys(key for job in failed for key in job.node.upstream.values())
    return [key for key in inputs if f"{root.name}/{key}/{MANIFEST}" in errors and (root / key / MANIFEST).exists()]


def stage_table(snapshot: Snapshot) -> Table:
    """Return a table with a row for each stage and a column for each state that occurs."""
    stages = snapshot.stages
    shown = [state for state in STATES if state != "done" and any(row[state] for row in stages.values())]
    right = ("done", "of", *shown)
    rows: list[list[RenderableType]] = []
    for stage, row in stages.items():
        bar = ProgressBar(total=row.total(), completed=row["done"], width=BAR_WIDTH, finished_style="green")
        done, *others = (Text(f"{row[it]:,}", STATES[it] if row[it] else "dim") for it in ("done", *shown))
        rows.append([stage, bar, done, f"{row.total():,}", *others])
    return plain_table("stage", "", *right, rows=rows, whole=right, right=right)


def job_table(snapshot: Snapshot) -> Table:
    """Return a table with a row for each job and a column for each metric that a job has."""
    jobs = snapshot.jobs.values()
    metrics = [item for item in METRICS.values() if item.is_column and any(item.key in job.metrics for job in jobs)]
    right = ["step", *(item.head for item in metrics), "age"]
    rows: list[list[RenderableType]] = []
    for job in jobs:
        numbers = [item.text(job.metrics[item.key]) if item.key in job.metrics else MISSING for item in metrics]
        rows.append([job.node.key, state_text(job.state), _step_text(job), *numbers, time_text(job.age_s), job.why])
    return plain_table("job", "state", *right, "why", rows=rows, whole=("state", *right), right=right)


def _active_table(jobs: list[JobView]) -> Table:
    """Return a table of the first SHOWN_JOBS running or submitted jobs: their present work, or why they wait."""
    right = ("step", "", "rate", "left", "wrote", "job")
    rows = [
        (
            job.node.key,
            _step_text(job),
            share_text(job.progress.share) if job.progress.share is not None else "",
            _rate_text(job.progress.steps_per_s),
            time_text(job.progress.remaining_s),
            MISSING if job.age_s is None or job.doing == STARTING else f"{time_text(job.age_s)} ago",
            _job_id(job),
            _now(job),
        )
        for job in jobs[:SHOWN_JOBS]
    ]
    more = [[f"and {len(jobs) - SHOWN_JOBS:,} more"]] if len(jobs) > SHOWN_JOBS else []
    table = plain_table("active", *right, "now", rows=[*rows, *more], whole=right, right=right, collapse_padding=True)
    table.columns[0].min_width = 16
    table.columns[-1].overflow, table.columns[-1].no_wrap = "ellipsis", True
    return table


def _failed_parts(snapshot: Snapshot, job: JobView) -> Iterator[RenderableType]:
    facts = [f"class {job.failure_class or 'not known'}"]
    facts += [f"job {_job_id(job)}"] if job.submitted is not None and job.submitted.job_id else []
    facts += [f"{time_text(job.age_s)} ago"] if job.unix_s is not None else []
    yield Text.assemble(("failed ", STATES["failed"]), (job.node.key, "bold"), f" ({', '.join(facts)})")
    advice = ADVICE.get(job.failure_class or "")
    lines = [job.why, f"advice: {advice}" if advice else ""]
    yield from (_indented(line, 2) for line in lines if line)
    yield from _log_parts(_log_of(snapshot, job), snapshot.lines)


def _log_parts(log: Path, number: int) -> Iterator[RenderableType]:
    lines = last_lines(log, number)
    yield _indented(f"the end of {log}:" if lines else f"no {log}", 2, style="dim")
    yield from [_indented("\n".join(lines), 4, style="dim")] if lines else []


def _indented(text: str, left: int, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, left), expand=False)


def _log_of(snapshot: Snapshot, job: JobView) -> Path:
    """Return the path of the job's own log; if this log is empty or missing, that of the submitted job's output."""
    log = Path(snapshot.plan.manifest(job.node)).with_name(LOG)
    return log if job.submitted is None or last_lines(log, 1) else job.submitted.output_log


def _step_text(job: JobView) -> str:
    """Return present and last step, such as "450/1200"; both count from the beginning of the curriculum."""
    step, end = job.progress.step, job.progress.end_step
    shown = MISSING if step is None else str(step)
    return shown if end is None else f"{shown}/{end}"


def _now(job: JobView) -> str:
    """Return the reason for a job's state, else the loss and residual of training, else the last line of the log."""
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


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return the driver, the number of jobs in each state by stage, failed preflights, all jobs, and the next step."""
    return {
        "experiment": snapshot.plan.experiment.name,
        "driver": None if snapshot.driver is None else {"pid": snapshot.driver.pid, "is_alive": snapshot.is_driven},
        "stages": {stage: {state: row[state] for state in STATES} for stage, row in snapshot.stages.items()},
        "failed_preflights": {check.hardware: check.log for check in snapshot.failed_preflights},
        "jobs": [_job_values(snapshot, job) for job in snapshot.jobs.values()],
        "next": next_step(snapshot),
    }


def _job_values(snapshot: Snapshot, job: JobView) -> dict[str, Any]:
    """Return the values of one job except those of `explain`; a failed job also has the last lines of its log."""
    known = {key: value for key, value in vars(job).items() if key not in ("node", "result", "runs", "code", "cost")}
    fingerprint = snapshot.plan.identities[job.node.key].fingerprint
    values = {"job": job.node.key, "stage": job.node.stage, "fingerprint": fingerprint, **known, "age_s": job.age_s}
    if job.state == "failed":
        log = _log_of(snapshot, job)
        values |= {"log": log, "last_lines": last_lines(log, snapshot.lines)}
    return values
