"""Sample what a job uses in the job itself, so that every cluster and this machine have it, and report it by rule.

A job on several nodes samples the first one.
"""

import math
import os
import resource
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.store import (
    PREEMPTED_EXIT,
    JobFiles,
    Record,
    load_all,
    read_attempts,
)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # short jobs are seen too, long ones are left alone
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT_S = 5.0  # signals wait meanwhile
AMD_CARDS = Path("/sys/class/drm")
MARGIN = 1.2  # of a proposed request over the 95th percentile
SAMPLED = ("minutes", "mem_mb", "cpus", "gpu_percent", "gpu_mem_mb")


class Usage:
    """What a job uses. `root`: its first process; `status`: its status file; `gpus`: how many it requested."""

    def __init__(self, root: int, status: Path, gpus: int) -> None:
        self.root, self.status, self.gpus = root, status, gpus
        self._children_cpu_s = children_cpu_s()
        self._pause_s, self._next, self._next_of_gpus = SHORTEST_PAUSE_S, 0.0, 0.0
        self._mem_mb = 0.0
        self._of_gpus: list[tuple[float, float]] = []  # percent and MB of one GPU

    def sample(self) -> None:
        """Look at the processes and the GPUs if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._pause_s = min(LONGEST_PAUSE_S, 1.2 * self._pause_s)
        self._next = now + self._pause_s
        mem_mb = 0.0
        for process in processes.of_job(self.root, self.status):
            with suppress(psutil.Error):
                mem_mb += process.memory_info().rss / 2**20
        self._mem_mb = max(self._mem_mb, mem_mb)
        if self.gpus and now >= self._next_of_gpus:
            self._next_of_gpus = now + LONGEST_PAUSE_S
            self._of_gpus += nvidia_gpus() or amd_gpus()

    def figures(self) -> dict[str, float]:
        """CPU seconds, peak memory in MB, and for GPUs the mean utilisation in percent and the peak memory in MB of one
        GPU, if they are known."""
        largest_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # also of processes never sampled
        found = {
            "cpu_s": round(children_cpu_s() - self._children_cpu_s, 1),
            "mem_mb": round(max(self._mem_mb, largest_mb)),
        }
        if self._of_gpus:
            percents, mbs = zip(*self._of_gpus, strict=True)
            found |= {"gpu_percent": round(sum(percents) / len(percents), 1), "gpu_mem_mb": round(max(mbs))}
        return found


def children_cpu_s() -> float:
    """The CPU seconds of all ended processes below this one."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def nvidia_gpus() -> list[tuple[float, float]]:
    """Utilisation in percent and memory in MB of each NVIDIA GPU of this job."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [*NVIDIA_SMI, *([f"--id={visible}"] if visible else [])]
    samples = []
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
        for line in done.stdout.splitlines():
            with suppress(ValueError):  # "[N/A]" of a part of a GPU
                percent, mb = map(float, line.split(","))
                samples.append((percent, mb))
    return samples


def amd_gpus(cards: Path = AMD_CARDS) -> list[tuple[float, float]]:
    """Utilisation in percent and memory in MB of each AMD GPU that this process may read."""
    samples = []
    for busy in cards.glob("card*/device/gpu_busy_percent"):
        with suppress(OSError, ValueError):
            used = int((busy.parent / "mem_info_vram_used").read_text())
            samples.append((float(busy.read_text()), used / 2**20))
    return samples


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel killed a process of this control group, of version 2 or 1, for lack of memory; 0 if
    unknown."""
    with suppress(OSError, ValueError, LookupError):
        entries = [line.split(":", 2) for line in proc.read_text().splitlines()]
        paths = {controller: path.lstrip("/") for _, names, path in entries for controller in names.split(",")}
        if "memory" in paths:
            file = root / "memory" / paths["memory"] / "memory.oom_control"
        else:
            file = root / paths[""] / "memory.events"
        return int(dict(line.split(" ", 1) for line in file.read_text().splitlines())["oom_kill"])
    return 0


@dataclass
class RuleUse:
    """All attempts of a rule's jobs. `samples`: a number for each attempt that ended well; `cpus` is the mean number of
    busy ones; `gpu_percent` and `gpu_mem_mb` are for one GPU."""

    rule: str
    jobs: int = 0
    hours: float = 0.0
    waiting_hours: float = 0.0
    failure_hours: float = 0.0
    requested: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SAMPLED})

    @property
    def proposed(self) -> dict[str, int]:
        """Resources for the rule: 1.2 times the 95th percentile, rounded up to 100 MB and a minute; {} if unknown."""
        found = {}
        minutes, mem_mb, cpus = (percentile_95(self.samples[name]) for name in ("minutes", "mem_mb", "cpus"))
        if minutes is not None:
            found["runtime"] = max(1, math.ceil(MARGIN * minutes))
        if mem_mb is not None:
            wanted = MARGIN * mem_mb - self.requested.get("extra_mem_mb", 0)
            found["mem_mb"] = max(100, 100 * math.ceil(wanted / 100))
        if cpus is not None and self.requested.get("threads", 1) > 1:
            found["threads"] = min(self.requested["threads"], max(1, math.ceil(cpus)))
        return found

    def add(self, files: JobFiles, record: Record, done: Sequence[dict[str, Any]]) -> None:
        """Add the attempts of one job."""
        self.jobs += 1
        for name, value in record.requested.items():  # the largest request, if they differ
            self.requested[name] = max(value, self.requested.get(name, 0))
        for attempt in done:
            self.waiting_hours += attempt["waited_s"] / 3600
            seconds = attempt.get("seconds")
            if seconds is None:
                if record.is_open or attempt is not done[-1]:
                    continue
                # killed: it was alive when it last printed something
                seconds = max(0.0, files.last_change() - attempt["unix_s"])
            used = {"minutes": seconds / 60, **attempt.get("used", {})}
            self.hours += seconds / 3600
            if attempt.get("exit_code") not in (0, PREEMPTED_EXIT):
                self.failure_hours += seconds / 3600
                continue
            if seconds and "cpu_s" in used:
                used["cpus"] = used["cpu_s"] / seconds
            for name in SAMPLED:
                self.samples[name] += [used[name]] if name in used else []

    def row(self) -> tuple[str, ...]:
        """Return a row of `table`: used / requested."""
        asked, gpu_percent = self.requested, self.samples["gpu_percent"]
        memory = asked.get("mem_mb", 0) + asked.get("extra_mem_mb", 0) if asked.get("mem_mb") else "-"
        mem_mb, cpus = percentile_95(self.samples["mem_mb"]), percentile_95(self.samples["cpus"])
        gpus = f"{asked.get('gpu') or '-'}"
        if gpu_percent:
            mean = sum(gpu_percent) / len(gpu_percent)
            gpus = f"{mean:.0f} % of {gpus}, {max(self.samples['gpu_mem_mb']):.0f} MB"
        return (
            self.rule,
            str(self.jobs),
            f"{self.hours:.2f}",
            f"{'-' if mem_mb is None else f'{mem_mb:.0f}'} / {memory}",
            "-" if cpus is None else f"{cpus:.1f} / {asked.get('threads', 1)}",
            gpus,
            f"{self.waiting_hours:.2f}",
            f"{self.failure_hours:.2f}",
            ", ".join(f"{name}={value}" for name, value in self.proposed.items()),
        )


def measure(folder: Path, since_unix_s: float = 0.0) -> list[RuleUse]:
    """Measure by rule the attempts that started after `since_unix_s`; those without an end count as waiting only."""
    rules: dict[str, RuleUse] = {}
    for files, record in load_all(folder):
        every = read_attempts(files.history, files.attempts)
        done = [attempt for attempt in every if attempt["unix_s"] >= since_unix_s]
        if record and done:
            rules.setdefault(record.rule, RuleUse(record.rule)).add(files, record, done)
    return list(rules.values())


def table(rules: Iterable[RuleUse]) -> str:
    """The report for people, with the rules of the most hours first."""
    heads = ("rule", "jobs", "hours", "memory MB", "CPUs", "GPUs", "waiting h", "failure h", "ask for")
    rows = [heads, *(use.row() for use in sorted(rules, key=lambda use: -use.hours))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def percentile_95(values: Sequence[float]) -> float | None:
    """The smallest value that 95 % of the values do not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)] if values else None
