"""Whether the kernel killed a process of this job for want of memory, as its control group counts it."""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of such kills so far in this process's control group; 0 where that is not known."""
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
        count = _field(file, "oom_kill")
        if count is not None:
            return count
    return 0


def _field(file: Path, name: str) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
