"""When a training state is committed, what happens when the disk refuses it, and when training stops on request."""

from __future__ import annotations

import logging
import time

import torch

from implicit_llm.training.distributed import max_over_ranks
from implicit_llm.training.operations.checkpoint import TrainingState
from implicit_llm.training.operations.checkpoint_store import CheckpointStore
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import faults, launched
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.journal import Journal

log = logging.getLogger(__name__)

_SAVE, _STOP = 1, 2
# Largest share of the time for saves by the clock: saving a 1.3B model takes longer than a minute.
_SAVE_SHARE = 0.02


class SaveSchedule:
    """Commits at the runtime's intervals, at steps to keep, at the end of the phase, and at once on a stop request.

    All ranks do the same at the same step, whichever of them was asked to stop or looked at the clock.
    A save that the disk refuses is left out once, as the next one is due soon; a second one in a row, or one that must
    not be lost, stops training.
    """

    def __init__(
        self, runtime: Runtime, stop: StopRequest, end_step: int, store: CheckpointStore, device: torch.device
    ) -> None:
        self._runtime, self._stop, self._store, self._device = runtime, stop, store, device
        self._end_step = end_step
        self._must_save = self._has_failed = False
        self._committed_step: int | None = None
        self._save_s = 0.0
        self.start()

    def start(self) -> None:
        """Begin to count the time to the next save."""
        self._last_save = time.monotonic()

    def after_step(self, step: int) -> tuple[bool, bool]:
        """Say whether to save the state after `step`, and whether to stop then. Collective."""
        faults.point("train.after_step")
        wish = max_over_ranks(self._wish(step), self._device)
        must_stop = bool(wish & _STOP)
        self._must_save = step >= self._end_step or step in self._store.keep or must_stop
        should_save = bool(wish) or self._must_save
        if should_save:
            self._save_s = -time.monotonic()  # until `after_save` adds the time then
        return should_save, must_stop

    def commit(self, state: TrainingState, journal: Journal) -> None:
        """Put a state on disk, the journal before it, so that no point is older than the state and missing.

        Raises: StorageError.
        """
        try:
            journal.flush_to_disk()
            self._store.commit(state)
        except StorageError as error:
            if self._must_save or self._has_failed:
                raise
            self._has_failed = True
            log.warning("%s; training goes on, the next save is the last try", error)
            journal.event("checkpoint_failed", step=state.global_step, error=str(error))
            return
        self._has_failed = False
        self._committed_step = state.global_step
        seconds, grace_s = self._store.last_save_s or 0.0, self._runtime.grace_s
        journal.event("checkpoint_committed", step=state.global_step, seconds=round(seconds, 3))
        launched.report_progress(state.global_step)
        if grace_s is not None and seconds > grace_s:
            log.warning(
                "a save takes %.1f s, longer than the grace of %.1f s after a stop signal: a stop loses steps",
                seconds,
                grace_s,
            )

    def after_save(self, step: int) -> bool:
        """Say whether to stop now, for a request that came while the state was being written. Collective."""
        # The state is on disk now; after another step it would have to be saved again.
        is_asked = max_over_ranks(int(bool(self._stop)), self._device)  # rank 0 comes here last: it has written
        self._last_save = time.monotonic()
        self._save_s += self._last_save
        return bool(is_asked and max_over_ranks(int(self._committed_step == step), self._device))

    def _wish(self, step: int) -> int:
        runtime = self._runtime
        is_due = runtime.save_steps is not None and step % runtime.save_steps == 0
        if runtime.save_every_s is not None:
            interval_s = max(runtime.save_every_s, self._save_s / _SAVE_SHARE if runtime.save_every_s else 0.0)
            is_due = is_due or time.monotonic() - self._last_save >= interval_s
        # As a maximum over ranks is taken, stopping implies saving.
        return _SAVE | _STOP if self._stop else _SAVE if is_due else 0
