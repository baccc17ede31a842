"""Signal handlers that hold for this process alone, not for those it forks.

`multiprocessing` ends its workers by SIGTERM and waits for them. A worker that had a Python handler of its parent, and
was about to wait for a lock, would never come to run it, and the parent would wait for ever.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# What a forked process does instead. Slurm sends USR2 to every process of a step, a terminal sends SIGINT to every
# process of the group, and only the parent is to act on them.
IN_FORKS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR2: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}

_handled: set[signal.Signals] = set()
_masks = threading.local()


def handle(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> object:
    """Let `handler` take one of these signals in this process. Returns: the handler before it, for `restore`."""
    if number not in IN_FORKS:
        raise ValueError(f"{number.name}: only {', '.join(known.name for known in IN_FORKS)} are handled")
    previous = signal.signal(number, handler)
    _handled.add(number)
    return previous


def restore(number: signal.Signals, previous: object) -> None:
    """Give the signal back to the handler it had."""
    signal.signal(number, previous)  # type: ignore[arg-type]
    if not callable(previous) or previous is signal.default_int_handler:
        _handled.discard(number)


def _hold_back() -> None:
    """Hold signals back before a fork: one that reached the child before it drops the handlers would be lost."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_to_parent() -> None:
    for number in _handled:
        signal.signal(number, IN_FORKS[number])
    _handled.clear()
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_to_parent)
