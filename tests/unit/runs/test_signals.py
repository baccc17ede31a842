from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from implicit_llm_contracts.runs import signals


def leave(number: int, frame: object) -> None:
    sys.exit(99)


@pytest.fixture(params=sorted(signals.IN_FORKS))
def handled(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    previous = signals.handle(request.param, leave)
    yield request.param
    signals.restore(request.param, previous)


def test_this_process_has_the_handler_and_a_fork_does_not(handled: signal.Signals) -> None:
    child = os.fork()
    if child == 0:
        in_fork = signal.getsignal(handled)
        os._exit(0 if in_fork == signals.IN_FORKS[handled] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(handled) is leave
    with pytest.raises(SystemExit):
        signal.raise_signal(handled)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_handler_taken_back_is_nobodys(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    previous = signals.handle(number, leave)
    assert previous == before
    signals.restore(number, previous)
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(number) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(number) == before
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
            deadline = time.monotonic() + 60
            while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
                time.sleep(0.01)
            codes = [worker.exitcode for worker in workers]
    finally:
        signals.restore(signal.SIGTERM, previous)
        for worker in workers:
            worker.kill()
    assert codes == [-signal.SIGTERM] * 20
