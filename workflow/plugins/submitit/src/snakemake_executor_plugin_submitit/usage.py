"""What a job uses of its node, sampled by the job itself: so it is known on every cluster, and on this machine.

Of a job on several nodes this is the first one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.job_files import STATUS_VARIABLE

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # short jobs are seen too, long ones are left alone
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop=10")
AMD_CARDS = Path("/sys/class/drm")


class Usage:
    """Context around a job; `root` is its first process, `status` its status file, the mark in the environment of all.

    `gpus`: how many it asked for.
    """

    def __init__(self, root: int, status: str, gpus: int) -> None:
        self.root, self.status, self.gpus = root, status, gpus
        self._children_cpu_s = children_cpu_s()
        self._begin = processes.start_ticks(root) or 0
        self._pause_s, self._next = SHORTEST_PAUSE_S, 0.0
        self._cpu_s: dict[tuple[int, int], float] = {}  # by pid and start, as seen last
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
        """Look at the processes, if it is time to; for the begin of the rule's command at once, which costs little."""
        if self._start_s is None:
            self._start_s = self._rule_begin()
        now = time.monotonic()
        if now < self._next:
            return
        self._pause_s = min(LONGEST_PAUSE_S, 1.2 * self._pause_s)
        self._next = now + self._pause_s
        below = processes.descendants(self.root)
        used = [
            processes.use_of(pid) for pid in {*below, *processes.with_environment(**{STATUS_VARIABLE: self.status})}
        ]
        self._mem_mb = max(self._mem_mb, sum(found.rss_mb for found in used if found))
        self._cpu_s.update({(found.pid, found.start_ticks): found.cpu_s for found in used if found})
        if self.gpus:
            self._gpu_samples += amd_gpus()

    def figures(self) -> dict[str, Any]:
        """CPU seconds, peak memory in MB, the seconds until the rule's command ran (None where it was not seen), and
        of GPUs the mean utilisation in percent and the peak memory in MB of one; {} of what is not known."""
        largest_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of those that are too short to see
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

    def _rule_begin(self) -> float | None:
        """Seconds until the first process below the Snakemake of the job; None: there is none yet."""
        pids = [self.root]
        for pid in pids:
            below = processes.children_of(pid)
            pids += below
            if below and processes.is_manager(processes.command_of(pid)) and (ticks := processes.start_ticks(below[0])):
                return round((ticks - self._begin) / processes.TICKS_PER_S, 1)
        return None

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


def children_cpu_s() -> float:
    """Of all processes that were started by this one, or by these, and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def amd_gpus(cards: Path = AMD_CARDS) -> list[tuple[float, float]]:
    """Percent and MB of each GPU of AMD's that this process may read."""
    samples = []
    for busy in cards.glob("card*/device/gpu_busy_percent"):
        with suppress(OSError, ValueError):
            used = int((busy.parent / "mem_info_vram_used").read_text())
            samples.append((float(busy.read_text()), used / 2**20))
    return samples


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel killed a process of this control group for want of memory; 0 where that is not known."""
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
