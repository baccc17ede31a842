"""Decide when to commit a training state and when to stop; handle a disk that refuses a checkpoint."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from implicit_llm.training.distributed import is_main, max_over_ranks
from implicit_llm.training.operations.checkpoint import CheckpointStore, Staging, TrainingState
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import faults, launched
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.journal import Journal

log = logging.getLogger(__name__)

_SAVE, _STOP = 1, 2
# With saves by the clock, saves stop training for at most 2 % of the time, and writes run for at most 20 % of it.
_STALL_SHARE, _WRITE_SHARE = 0.02, 0.2


class SaveSchedule:
    """A schedule that saves at the runtime's intervals, at kept steps, at the end of the phase, and on a stop request.

    A state is copied to host memory and written by a thread while training continues; one write ends before the next
    starts. All ranks save at the same step, whichever rank got the stop request; rank 0 checks the clock and writes. If
    the disk refuses a save, training continues once, because the next save is due soon. A second refusal in a row stops
    training. So does the refusal of a state that must not be lost: at a kept step, at the end or on a stop request.
    After an error, the context waits for the current write before it ends; after a second Ctrl-C it does not.
    steps: it starts at the number of steps that are finished already, and stops at the end of the phase. If
    `after_step` is not called at a multiple of `save_steps`, its next call saves.
    """

    def __init__(
        self,
        runtime: Runtime,
        stop: StopRequest,
        steps: range,
        store: CheckpointStore,
        journal: Journal,
    ) -> None:
        self._runtime, self._stop, self._store = runtime, stop, store
        self._previous, self._end_step, self._journal = steps.start, steps.stop, journal
        self._must_save = self._is_last_try = False
        self._write: Future[object] | None = None
        self._written_step = 0
        self._staging = Staging()
        self._due_at, self._last_save = math.inf, time.monotonic()  # the first interval includes compilation
        self._stall_s = self._between_stops_s = 0.0

    def __enter__(self) -> SaveSchedule:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            with suppress(StorageError):  # the error that ends training has priority
                self._finish_write()

    def after_step(self, step: int) -> tuple[bool, bool]:
        """Return whether to save the state after `step`, and whether to stop then. Collective. Raises: StorageError."""
        faults.point("train.after_step")
        if self._write is not None and self._write.done():
            self._finish_write()
        now = time.monotonic()
        self._between_stops_s, self._due_at = now - max(self._due_at, self._last_save), now
        wish = max_over_ranks(self._wish(step))
        self._previous = step
        must_stop = bool(wish & _STOP)
        self._must_save = step >= self._end_step or step in self._store.keep or must_stop
        return bool(wish) or self._must_save, must_stop

    def commit(self, state: TrainingState) -> None:
        """Flush the journal, so that no metrics before a committed state are missing, then start to write the state.

        A state that must not be lost is committed when the call returns.
        Raises: StorageError; the first of several refusals in a row is only logged if the state may be lost.
        """
        self._finish_write()
        self._is_last_try |= self._must_save
        self._written_step = state.global_step
        try:
            self._journal.flush_to_disk()
            staged = self._staging.copy_of(state)
            self._write = in_background(lambda: self._store.commit(staged))
        except StorageError as error:
            self._refused(error)
        if self._must_save:
            self._finish_write()
        self._last_save = time.monotonic()
        self._stall_s = self._last_save - self._due_at

    def _finish_write(self) -> None:
        """Wait for the current write, if any, and report how it ended. Raises: StorageError, see `commit`."""
        if self._write is None:
            return
        write, self._write = self._write, None
        try:
            write.result()
        except StorageError as error:
            self._refused(error)
            return
        self._is_last_try = False
        seconds, grace_s = self._store.last_save_s, self._runtime.grace_s
        self._journal.event("checkpoint_committed", step=self._written_step, seconds=round(seconds, 3))
        launched.report_progress(self._written_step)
        # In the worst case, a stop signal comes just after a step at which training can stop, during an earlier write.
        if grace_s is not None and self._between_stops_s + 2 * seconds > grace_s:
            log.warning(
                "a stop may wait %.1f s for a step at which training can stop, and for two saves of %.1f s, longer than"
                " the grace of %.1f s after a stop signal: steps can be lost",
                self._between_stops_s,
                seconds,
                grace_s,
            )

    def _refused(self, error: StorageError) -> None:
        if self._is_last_try:
            raise error
        self._is_last_try = True
        log.warning("%s; training goes on, the next save is the last try", error)
        self._journal.event("checkpoint_failed", step=self._written_step, error=str(error))

    def _wish(self, step: int) -> int:
        runtime = self._runtime
        every = runtime.save_steps
        is_due = every is not None and step // every > self._previous // every
        if runtime.save_every_s is not None and is_main() and self._write is None:
            interval_s = save_interval_s(runtime.save_every_s, self._stall_s, self._store.last_save_s)
            is_due = is_due or time.monotonic() - self._last_save >= interval_s
        # A request to stop includes one to save, because all ranks follow the largest request.
        return _SAVE | _STOP if self._stop else _SAVE if is_due else 0


def save_interval_s(wanted_s: float, stall_s: float, write_s: float) -> float:
    """Return the seconds between two saves by the clock: `wanted_s`, or more after a slow save.

    stall_s, write_s: how long the last save stopped training, and how long its write took. With `wanted_s` 0, each save
    starts as soon as the previous write has ended.
    """
    return wanted_s and max(wanted_s, stall_s / _STALL_SHARE, write_s / _WRITE_SHARE)


def in_background(work: Callable[[], object]) -> Future[object]:
    """Run `work` in a daemon thread; return a future of the result or exception."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
