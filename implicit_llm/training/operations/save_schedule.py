"""When a training state is committed, and when training stops on request."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch

from implicit_llm.training.distributed import max_over_ranks
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import faults

_SAVE, _STOP = 1, 2
# Largest share of the time for saves by the clock: saving a 1.3B model takes longer than a minute.
_SAVE_SHARE = 0.02


class SaveSchedule:
    """Commits at the runtime's intervals, at steps to keep, at the end of the phase, and at once on a stop request.

    All ranks do the same at the same step, whichever of them was asked to stop or looked at the clock.
    must_save: whether this step's state must not be lost. committed_step: the last step on disk, set on commit.
    """

    def __init__(
        self, runtime: Runtime, stop: StopRequest, end_step: int, keep: Collection[int], device: torch.device
    ) -> None:
        self.must_save = False
        self.committed_step: int | None = None
        self._runtime = runtime
        self._stop = stop
        self._end_step = end_step
        self._keep = frozenset(keep)
        self._device = device
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
        self.must_save = step >= self._end_step or step in self._keep or must_stop
        should_save = bool(wish) or self.must_save
        if should_save:
            self._save_s = -time.monotonic()  # until `after_save` adds the time then
        return should_save, must_stop

    def after_save(self, step: int) -> bool:
        """Say whether to stop now, for a request that came while the state was being written. Collective."""
        # The state is on disk now; after another step it would have to be saved again.
        is_asked = max_over_ranks(int(bool(self._stop)), self._device)  # rank 0 comes here last: it has written
        self._last_save = time.monotonic()
        self._save_s += self._last_save
        return bool(is_asked and max_over_ranks(int(self.committed_step == step), self._device))

    def _wish(self, step: int) -> int:
        runtime = self._runtime
        is_due = runtime.save_steps is not None and step % runtime.save_steps == 0
        if runtime.save_every_s is not None:
            interval_s = max(runtime.save_every_s, self._save_s / _SAVE_SHARE if runtime.save_every_s else 0.0)
            is_due = is_due or time.monotonic() - self._last_save >= interval_s
        # As a maximum over ranks is taken, stopping implies saving.
        return _SAVE | _STOP if self._stop else _SAVE if is_due else 0
