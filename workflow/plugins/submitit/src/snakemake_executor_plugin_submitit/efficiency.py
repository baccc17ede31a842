"""What the jobs of each rule used of what they asked for, what time was lost, and what to ask for instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit import attempts, record
from snakemake_executor_plugin_submitit.failure import PREEMPTED_EXIT
from snakemake_executor_plugin_submitit.job_files import JobFiles
from snakemake_executor_plugin_submitit.record import Record

MARGIN = 1.2  # of a proposed request over the 95th percentile


@dataclass
class RuleUse:
    """Of all attempts of a rule's jobs. Lists have one number for each attempt that ended: `cpus` is the mean number of
    busy ones; `gpu_percent` and `gpu_mem_mb` are of one GPU."""

    rule: str
    jobs: int = 0
    hours: float = 0.0
    waiting_hours: float = 0.0
    start_hours: float = 0.0
    failure_hours: float = 0.0
    requested: dict[str, Any] = field(default_factory=dict)
    minutes: list[float] = field(default_factory=list)
    mem_mb: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    gpu_percent: list[float] = field(default_factory=list)
    gpu_mem_mb: list[float] = field(default_factory=list)

    @property
    def proposed(self) -> dict[str, int]:
        """Resources for the rule: 1.2 times the 95th percentile, in steps of 100 MB and of a minute; {} if unknown."""
        found = {}
        if self.minutes:
            found["runtime"] = max(1, math.ceil(MARGIN * percentile_95(self.minutes)))
        if self.mem_mb:
            wanted = MARGIN * percentile_95(self.mem_mb) - self.requested.get("extra_mem_mb", 0)
            found["mem_mb"] = max(100, 100 * math.ceil(wanted / 100))
        if self.cpus and self.requested.get("threads", 1) > 1:
            found["threads"] = min(self.requested["threads"], max(1, math.ceil(percentile_95(self.cpus))))
        return found

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "proposed": self.proposed}


def measure(folder: Path, since_unix_s: float = 0.0) -> list[RuleUse]:
    """By rule, from the attempts that began after `since_unix_s`; those without an end yet count as waiting only."""
    rules: dict[str, RuleUse] = {}
    for path in sorted((folder / "jobs").glob("*/record.json")):
        files = JobFiles(path.parent)
        known = record.load(files)
        done = [
            (start, end)
            for start, end in attempts.pairs(files.history, files.attempts)
            if start.get("unix_s", 0.0) >= since_unix_s
        ]
        if known is not None and known.rule and done:
            _add(rules.setdefault(known.rule, RuleUse(known.rule)), known, done, files)
    return list(rules.values())


def _add(
    use: RuleUse, known: Record, done: Sequence[tuple[dict[str, Any], dict[str, Any] | None]], files: JobFiles
) -> None:
    use.jobs += 1
    for name, value in known.requested.items():  # the largest request, where they differ
        before = use.requested.get(name)
        use.requested[name] = max(value, before) if isinstance(value, int) and isinstance(before, int) else value
    for start, end in done:
        use.waiting_hours += start.get("waited_s", 0.0) / 3600
        if end is None:
            if not known.is_open and start is done[-1][0]:  # killed: it last printed something when it was alive
                seconds = max(0.0, files.last_change() - start["unix_s"])
                use.hours += seconds / 3600
                use.failure_hours += seconds / 3600
            continue
        seconds, used = end["seconds"], end.get("used", {})
        use.hours += seconds / 3600
        use.start_hours += (used.get("start_s") or 0.0) / 3600
        if end["exit_code"] not in (0, PREEMPTED_EXIT):
            use.failure_hours += seconds / 3600
            continue
        use.minutes.append(seconds / 60)
        for name in ("mem_mb", "gpu_percent", "gpu_mem_mb"):
            getattr(use, name).extend([used[name]] if name in used else [])
        use.cpus.extend([used["cpu_s"] / seconds] if seconds and "cpu_s" in used else [])


def table(rules: Iterable[RuleUse]) -> str:
    """For people: used / asked for, the rules with the most hours first."""
    heads = ("rule", "jobs", "hours", "memory MB", "CPUs", "GPUs", "waiting h", "start h", "failure h", "ask for")
    rows = [heads, *(_row(use) for use in sorted(rules, key=lambda use: -use.hours))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(use: RuleUse) -> tuple[str, ...]:
    asked, unknown = use.requested, "-"
    memory = asked.get("mem_mb", 0) + asked.get("extra_mem_mb", 0) if asked.get("mem_mb") else unknown
    gpus = unknown
    if asked.get("gpu"):
        gpus = f"{asked['gpu']}"
        if use.gpu_percent:
            mean = sum(use.gpu_percent) / len(use.gpu_percent)
            gpus = f"{mean:.0f} % of {asked['gpu']}, {max(use.gpu_mem_mb):.0f} MB"
    return (
        use.rule,
        str(use.jobs),
        f"{use.hours:.2f}",
        f"{percentile_95(use.mem_mb):.0f} / {memory}" if use.mem_mb else f"- / {memory}",
        f"{percentile_95(use.cpus):.1f} / {asked.get('threads', 1)}" if use.cpus else unknown,
        gpus,
        f"{use.waiting_hours:.2f}",
        f"{use.start_hours:.2f}",
        f"{use.failure_hours:.2f}",
        ", ".join(f"{name}={value}" for name, value in use.proposed.items()),
    )


def percentile_95(values: Sequence[float]) -> float:
    """The smallest of the values that 95 % do not exceed."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]
