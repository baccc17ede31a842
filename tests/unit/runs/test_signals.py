import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from implicit_llm_contracts.runs import signals


def leave(number: int, frame: object) -> None:
    sys.exit(99)


def fork_has(number: int, handler: object) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(number) == handler else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(params=sorted(signals.IN_FORKS))
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal without a handler, also where a job of another test left one."""
    before = signal.getsignal(request.param)
    signals.restore(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_this_process_has_the_handler_until_it_is_taken_back_and_a_fork_does_not(number: signal.Signals) -> None:
    previous = signals.handle(number, leave)
    assert fork_has(number, signals.IN_FORKS[number])
    with pytest.raises(SystemExit):
        signal.raise_signal(number)
    signals.restore(number, previous)
    assert previous == signal.getsignal(number) == signal.SIG_DFL
    assert fork_has(number, signal.SIG_DFL)


def test_other_signals_are_refused() -> None:
    with pytest.raises(ValueError, match="SIGHUP"):
        signals.handle(signal.SIGHUP, leave)


def test_workers_of_a_pool_end_whatever_they_wait_for() -> None:
    previous = signals.handle(signal.SIGTERM, leave)
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    try:
        with lock:  # a worker cannot run a Python handler while it waits for a lock
            workers = [context.Process(target=lock.acquire) for _ in range(20)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(60)
        assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 20
    finally:
        signals.restore(signal.SIGTERM, previous)
        for worker in workers:
            worker.kill()
