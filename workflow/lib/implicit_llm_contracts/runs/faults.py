"""Define named points at which a test can kill a process, signal it, or make it fail.

`IMPLICIT_LLM_FAULT=journal.before_append:kill9@2` kills the process when it passes this point for the second time;
`@2+` also injects the fault each time after that. Several faults are separated by commas. The kinds are kill9, sigterm,
raise, and the system errors enospc, eacces, eio and estale. With `IMPLICIT_LLM_FAULT_TRACE=file`, each point that the
process passes appends its name to the file. Without these variables a point does nothing.
"""

import errno
import os
import re
import signal
from collections import Counter

KINDS = ("kill9", "sigterm", "raise", "enospc")  # the tests inject these at every point
VARIABLE = "IMPLICIT_LLM_FAULT"
ERRORS = {"enospc": errno.ENOSPC, "eacces": errno.EACCES, "eio": errno.EIO, "estale": errno.ESTALE}
_hits: Counter[str] = Counter()


class FaultInjected(Exception):
    """The process passed a point at which a fault of the kind `raise` was injected."""


def point(name: str) -> None:
    """Mark a point at which a fault can be injected; `name` must be a literal, so that the tests find it.

    Raises: the injected error; ValueError if IMPLICIT_LLM_FAULT is wrong.
    """
    faults, trace = os.environ.get(VARIABLE), os.environ.get(f"{VARIABLE}_TRACE")
    if faults is None and trace is None:
        return
    _hits[name] += 1
    if trace:
        with open(trace, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    for fault in filter(None, (faults or "").split(",")):
        wanted, kind, first, is_lasting = _parse(fault)
        if wanted == name and (_hits[name] == first or (is_lasting and _hits[name] > first)):
            _inject(name, kind)


def reset() -> None:
    """Reset the counts of passed points to zero."""
    _hits.clear()


def _parse(fault: str) -> tuple[str, str, int, bool]:
    kinds = dict.fromkeys((*KINDS, *ERRORS))
    match = re.fullmatch(rf"([^:]*):({'|'.join(kinds)})(?:@([0-9]+)([+]?))?", fault)
    if match is None:
        raise ValueError(
            f"{VARIABLE}={fault}: expected NAME:KIND, @N or @N+ after it, with KIND one of {', '.join(kinds)}"
        )
    return match[1], match[2], int(match[3] or 1), bool(match[4])


def _inject(name: str, kind: str) -> None:
    if kind in ERRORS:
        raise OSError(ERRORS[kind], f"injected at {name}")
    if kind == "raise":
        raise FaultInjected(name)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill9" else signal.SIGTERM)
