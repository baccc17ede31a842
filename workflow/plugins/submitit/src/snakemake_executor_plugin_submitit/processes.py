"""Processes of this machine, as /proc tells of them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Use:
    """`rss_mb`: memory that it holds, shared pages included; `cpu_s`: of itself, in all its time."""

    pid: int
    start_ticks: int
    rss_mb: float
    cpu_s: float


def use_of(pid: int) -> Use | None:
    """None: gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] == "Z":
        return None
    rss_mb = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Use(pid, int(fields[19]), rss_mb, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid this names one process for ever. None: gone."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_alive(pid: int, started: int | None) -> bool:
    """Whether this very process runs; another one with a reused pid is another one."""
    ticks = start_ticks(pid)
    return ticks is not None and (started is None or ticks == started)


def descendants(root: int) -> list[int]:
    """`root` and the processes below it, parents first."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = _stat_fields(pid)
        if fields is not None and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root] if _stat_fields(root) else []
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def children_of(pid: int) -> list[int]:
    """The processes that its threads started, without a look at all others; [] on kernels that do not say."""
    found = []
    with suppress(OSError, ValueError):
        for thread in (PROC / str(pid) / "task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_of(pid: int) -> list[str]:
    """Its command line; [] if it is gone."""
    with suppress(OSError):
        raw = (PROC / str(pid) / "cmdline").read_bytes()
        return [part.decode("utf-8", "replace") for part in raw.split(b"\0") if part]
    return []


def with_environment(**wanted: str | None) -> list[int]:
    """The processes that were started with these variables set to these values; None: not set."""
    pairs = {name.encode(): None if value is None else value.encode() for name, value in wanted.items()}
    found = []
    for pid in all_pids():
        with suppress(OSError):
            raw = (PROC / str(pid) / "environ").read_bytes()
            given = dict(entry.partition(b"=")[::2] for entry in raw.split(b"\0") if entry)
            if given and all(given.get(name) == value for name, value in pairs.items()):
                found.append(pid)
    return found


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_manager(command: list[str]) -> bool:
    """Whether this is a Snakemake, which only waits for its job, or an srun, whose tasks Slurm tells by itself."""
    names = {os.path.basename(part) for part in command[:1]}
    is_snakemake = command[1:3] == ["-m", "snakemake"] or any(
        os.path.basename(part) == "snakemake" for part in command[:2]
    )
    return "srun" in names or is_snakemake


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the command before it may contain anything."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()
