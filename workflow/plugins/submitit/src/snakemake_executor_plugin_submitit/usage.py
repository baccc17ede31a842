"""What jobs use: sampled by each job itself, so it is known on every cluster and on this machine, and reported by rule.

A job on several nodes samples the first one.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from snakemake_executor_plugin_submitit import attempts, processes
from snakemake_executor_plugin_submitit.store import STATUS_VARIABLE, JobFiles, Record, load_all

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # short jobs are seen too, long ones are left alone
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop=10")
AMD_CARDS = Path("/sys/class/drm")
MARGIN = 1.2  # of a proposed request over the 95th percentile


class Usage:
    """Context around a job. `root`: its first process; `status`: its status file, which all its processes have in their
    environment; `gpus`: how many it requested."""

    def __init__(self, root: int, status: str, gpus: int) -> None:
        self.root, self.status, self.gpus = root, status, gpus
        self._children_cpu_s = children_cpu_s()
        self._pause_s, self._next = SHORTEST_PAUSE_S, 0.0
        self._cpu_s: dict[psutil.Process, float] = {}  # as seen last
        self._mem_mb = 0.0
        self._start_s: float | None = None
        self._gpu_samples: list[tuple[float, float]] = []  # percent and MB of one GPU
        self._smi: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Usage:
        if self.gpus:
            self._smi_output = tempfile.TemporaryFile()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            command = [*NVIDIA_SMI, *([f"--id={visible}"] if visible else [])]
            with suppress(OSError):
                self._smi = subprocess.Popen(command, stdout=self._smi_output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: object) -> None:
        if self._smi is not None:
            self._smi.kill()
            self._smi.wait()
        if self.gpus:
            self._smi_output.close()

    def sample(self) -> None:
        """Look at the processes if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._pause_s = min(LONGEST_PAUSE_S, 1.2 * self._pause_s)
        self._next = now + self._pause_s
        below, mem_mb = processes.descendants(self.root), 0.0
        for process in {*below, *processes.with_environment(**{STATUS_VARIABLE: self.status})}:
            with suppress(psutil.Error), process.oneshot():
                mem_mb += process.memory_info().rss / 2**20
                self._cpu_s[process] = sum(process.cpu_times()[:2])
        self._mem_mb = max(self._mem_mb, mem_mb)
        if self._start_s is None:
            self._start_s = rule_start_s(below)
        if self.gpus:
            self._gpu_samples += amd_gpus()

    def figures(self) -> dict[str, Any]:
        """CPU seconds, peak memory in MB, seconds until the rule's command ran (None if it was not seen), and for GPUs
        the mean utilisation in percent and the peak memory in MB of one GPU, left out if unknown."""
        largest_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # also of processes never sampled
        found = {
            "cpu_s": round(max(children_cpu_s() - self._children_cpu_s, sum(self._cpu_s.values())), 1),
            "mem_mb": round(max(self._mem_mb, largest_mb)),
            "start_s": self._start_s,
        }
        samples = [*self._gpu_samples, *self._nvidia_samples()]
        if samples:
            found["gpu_percent"] = round(sum(percent for percent, _ in samples) / len(samples), 1)
            found["gpu_mem_mb"] = round(max(mb for _, mb in samples))
        return found

    def _nvidia_samples(self) -> list[tuple[float, float]]:
        if self._smi is None:
            return []
        self._smi_output.seek(0)
        samples = []
        for line in self._smi_output.read().decode("utf-8", "replace").splitlines():
            with suppress(ValueError):  # "[N/A]" of a part of a GPU
                percent, mb = line.split(",")
                samples.append((float(percent), float(mb)))
        return samples


def rule_start_s(below: Sequence[psutil.Process]) -> float | None:
    """Seconds from the start of the job, the first of its processes, to the first process below its Snakemake; None:
    there is none yet."""
    for process in filter(processes.is_manager, below):
        with suppress(psutil.Error):
            for child in process.children()[:1]:
                return round(child.create_time() - below[0].create_time(), 1)
    return None


def children_cpu_s() -> float:
    """The CPU seconds of all ended processes below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def amd_gpus(cards: Path = AMD_CARDS) -> list[tuple[float, float]]:
    """Utilisation in percent and memory in MB of each AMD GPU that this process may read."""
    samples = []
    for busy in cards.glob("card*/device/gpu_busy_percent"):
        with suppress(OSError, ValueError):
            used = int((busy.parent / "mem_info_vram_used").read_text())
            samples.append((float(busy.read_text()), used / 2**20))
    return samples


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel killed a process of this control group for lack of memory; 0 if unknown."""
    try:
        entries = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return 0
    for _, controllers, path in entries:
        if controllers == "":
            file = root / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = root / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        with suppress(OSError, ValueError):
            counts = dict(line.split(" ", 1) for line in file.read_text().splitlines())
            return int(counts["oom_kill"]) if "oom_kill" in counts else 0
    return 0


@dataclass
class RuleUse:
    """All attempts of a rule's jobs. Lists have one number for each attempt that ended: `cpus` is the mean number of
    busy ones; `gpu_percent` and `gpu_mem_mb` are for one GPU."""

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
        """Resources for the rule: 1.2 times the 95th percentile, rounded up to 100 MB and a minute; {} if unknown."""
        found = {}
        if self.minutes:
            found["runtime"] = max(1, math.ceil(MARGIN * percentile_95(self.minutes)))
        if self.mem_mb:
            wanted = MARGIN * percentile_95(self.mem_mb) - self.requested.get("extra_mem_mb", 0)
            found["mem_mb"] = max(100, 100 * math.ceil(wanted / 100))
        if self.cpus and self.requested.get("threads", 1) > 1:
            found["threads"] = min(self.requested["threads"], max(1, math.ceil(percentile_95(self.cpus))))
        return found

    def add(
        self, files: JobFiles, record: Record, done: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]
    ) -> None:
        """Add the attempts of one job."""
        self.jobs += 1
        for name, value in record.requested.items():  # the largest request, if they differ
            before = self.requested.get(name)
            self.requested[name] = max(value, before) if isinstance(value, int) and isinstance(before, int) else value
        for start, end in done:
            self.waiting_hours += start["waited_s"] / 3600
            if end is None:
                if not record.is_open and start is done[-1][0]:  # killed: it was alive when it last printed something
                    hours = max(0.0, files.last_change() - start["unix_s"]) / 3600
                    self.hours += hours
                    self.failure_hours += hours
                continue
            seconds, used = end["seconds"], end["used"]
            self.hours += seconds / 3600
            self.start_hours += (used.get("start_s") or 0.0) / 3600
            if end["exit_code"] not in (0, attempts.PREEMPTED_EXIT):
                self.failure_hours += seconds / 3600
                continue
            self.minutes.append(seconds / 60)
            for name in ("mem_mb", "gpu_percent", "gpu_mem_mb"):
                getattr(self, name).extend([used[name]] if name in used else [])
            self.cpus.extend([used["cpu_s"] / seconds] if seconds and "cpu_s" in used else [])

    def row(self) -> tuple[str, ...]:
        """For `table`: used / requested."""
        asked = self.requested
        memory = asked.get("mem_mb", 0) + asked.get("extra_mem_mb", 0) if asked.get("mem_mb") else "-"
        gpus = f"{asked['gpu']}" if asked.get("gpu") else "-"
        if self.gpu_percent:
            mean = sum(self.gpu_percent) / len(self.gpu_percent)
            gpus = f"{mean:.0f} % of {gpus}, {max(self.gpu_mem_mb):.0f} MB"
        return (
            self.rule,
            str(self.jobs),
            f"{self.hours:.2f}",
            f"{percentile_95(self.mem_mb):.0f} / {memory}" if self.mem_mb else f"- / {memory}",
            f"{percentile_95(self.cpus):.1f} / {asked.get('threads', 1)}" if self.cpus else "-",
            gpus,
            f"{self.waiting_hours:.2f}",
            f"{self.start_hours:.2f}",
            f"{self.failure_hours:.2f}",
            ", ".join(f"{name}={value}" for name, value in self.proposed.items()),
        )


def measure(folder: Path, since_unix_s: float = 0.0) -> list[RuleUse]:
    """By rule, from the attempts that started after `since_unix_s`; those without an end yet count as waiting only."""
    rules: dict[str, RuleUse] = {}
    for files, record in load_all(folder):
        every = attempts.read(files.history, files.attempts)
        done = [(start, end) for start, end in every if start["unix_s"] >= since_unix_s]
        if record is not None and done:
            rules.setdefault(record.rule, RuleUse(record.rule)).add(files, record, done)
    return list(rules.values())


def table(rules: Iterable[RuleUse]) -> str:
    """The report for people, with the rules of the most hours first."""
    heads = ("rule", "jobs", "hours", "memory MB", "CPUs", "GPUs", "waiting h", "start h", "failure h", "ask for")
    rows = [heads, *(use.row() for use in sorted(rules, key=lambda use: -use.hours))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def percentile_95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]
