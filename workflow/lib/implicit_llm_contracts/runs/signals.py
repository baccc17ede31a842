"""Install signal handlers that the forks of this process do not inherit.

`multiprocessing` ends its workers by SIGTERM and waits for them. If a worker inherited a Python handler and waited for
a lock, the handler would never run, and the parent would wait forever.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# The handlers of forked processes. Slurm sends USR2 to every process of a step, and a terminal sends SIGINT to every
# process of the group, but only the parent must handle them.
IN_FORKS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR2: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}

_handled: set[signal.Signals] = set()
_masks = threading.local()


def handle(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> object:
    """Handle a signal of IN_FORKS by `handler`; return the previous handler. Raises: ValueError for another signal."""
    if number not in IN_FORKS:
        raise ValueError(f"{number.name}: only {', '.join(known.name for known in IN_FORKS)} are handled")
    previous = signal.signal(number, handler)
    _handled.add(number)
    return previous


def restore(number: signal.Signals, previous: object) -> None:
    """Restore the handler `previous` of a signal, which `handle` returned."""
    signal.signal(number, previous)  # type: ignore[arg-type]
    if not callable(previous) or previous is signal.default_int_handler:
        _handled.discard(number)


def _hold_back() -> None:
    """Block handled signals before a fork, because the child would lose them until it has dropped its handlers."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_to_parent() -> None:
    for number in _handled:
        signal.signal(number, IN_FORKS[number])
    _handled.clear()
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_to_parent)
