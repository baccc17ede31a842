"""Who holds a lock file, without touching the lock: a reader that tried it would be in the way of a job that starts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Holder:
    """As the file names it. `is_alive`: None where it is a process of another machine."""

    pid: int
    host: str | None
    is_alive: bool | None


def holder_of(path: Path) -> Holder | None:
    """Of a file that says "123" or "process 123 on HOST"; None where nobody ever held it, or said so."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        inode = path.stat().st_ino
    except OSError:
        return None
    match = re.fullmatch(r"(?:process )?(\d+)(?: on (\S+))?\s*", text)
    if match is None:
        return None
    pid, host = int(match[1]), match[2]
    if host is not None and host != socket.gethostname():
        return Holder(pid, host, None)
    return Holder(pid, host, _is_locked(pid, inode))


def _is_locked(pid: int, inode: int) -> bool:
    """Whether the kernel lists a lock on this file: a process of that number may be another one by now."""
    try:
        lines = LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _is_process(pid)
    for line in lines:  # 1: FLOCK  ADVISORY  WRITE 708 08:01:131 0 EOF; "->" stands in one that waits
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode:
            return True
    return False


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
