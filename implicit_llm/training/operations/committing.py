"""Bringing training states to disk while a phase runs, and what happens when the disk does not take one."""

from __future__ import annotations

import logging

from implicit_llm.training.operations.checkpoint import TrainingState
from implicit_llm.training.operations.checkpoint_store import CheckpointStore
from implicit_llm.training.operations.save_schedule import SaveSchedule
from implicit_llm_contracts.runs import job_status
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.journal import Journal

log = logging.getLogger(__name__)


class Committer:
    """Commits a state; the journal goes to disk before it, so that no point is older than the state and missing.

    A save that the disk refuses is left out once, as the next one is due soon; a second one in a row, or one that must
    not be lost, stops training.
    """

    def __init__(self, store: CheckpointStore, schedule: SaveSchedule, journal: Journal, grace_s: float | None) -> None:
        self._store = store
        self._schedule = schedule
        self._journal = journal
        self._grace_s = grace_s
        self._has_failed = False

    def __call__(self, state: TrainingState) -> None:
        """Raises: StorageError."""
        try:
            self._journal.flush_to_disk()
            self._store.commit(state)
        except StorageError as error:
            if self._schedule.must_save or self._has_failed:
                raise
            self._has_failed = True
            log.warning("%s; training goes on, the next save is the last try", error)
            self._journal.event("checkpoint_failed", step=state.global_step, error=str(error))
            return
        self._has_failed = False
        self._schedule.committed_step = state.global_step
        seconds = self._store.last_save_s or 0.0
        self._journal.event("checkpoint_committed", step=state.global_step, seconds=round(seconds, 3))
        job_status.report_progress(state.global_step)
        if self._grace_s is not None and seconds > self._grace_s:
            log.warning(
                "a save takes %.1f s, longer than the grace of %.1f s after a stop signal: a stop loses steps",
                seconds,
                self._grace_s,
            )
