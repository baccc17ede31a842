"""When a training state is committed, and when training stops on request."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from implicit_llm.training.distributed import max_over_ranks
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import faults

_SAVE, _STOP = 1, 2
# Of the time, at most, goes into saves by the clock: those of a 1.3B model take longer than a minute.
_SAVE_SHARE = 0.02


class SaveSchedule(TrainerCallback):
    """Commits at the runtime's intervals, at steps to keep, at the end of the phase, and at once on a stop request.

    All ranks do the same at the same step, whichever of them was asked to stop or looked at the clock.
    must_save: whether this step's state must not be lost. committed_step: the last one on disk; who commits sets it.
    """

    def __init__(self, runtime: Runtime, stop: StopRequest, keep: Collection[int] = ()) -> None:
        self.must_save = False
        self.committed_step: int | None = None
        self._runtime = runtime
        self._stop = stop
        self._keep = frozenset(keep)
        self._last_save = time.monotonic()
        self._save_s = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last_save = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        faults.point("train.after_step")
        wish = max_over_ranks(self._wish(state.global_step), args.device)
        is_last = state.global_step >= state.max_steps
        is_kept = state.global_step in self._keep
        self.must_save = is_last or is_kept or bool(wish & _STOP)
        if is_last:
            control.should_log = True  # so that no metrics are left over for the next phase
        if wish or is_kept or is_last:
            control.should_save = True
            self._save_s = -time.monotonic()  # until `on_save` adds the time then
        if wish & _STOP:
            control.should_training_stop = True
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # Asked while the state was being written: it is on disk now, another step would only have to be saved again.
        is_asked = max_over_ranks(int(bool(self._stop)), args.device)  # rank 0 comes here last: it has written
        self._last_save = time.monotonic()
        self._save_s += self._last_save
        if is_asked and max_over_ranks(int(self.committed_step == state.global_step), args.device):
            control.should_training_stop = True
        return control

    def _wish(self, step: int) -> int:
        runtime = self._runtime
        is_due = runtime.save_steps is not None and step % runtime.save_steps == 0
        if runtime.save_every_s is not None:
            interval_s = max(runtime.save_every_s, self._save_s / _SAVE_SHARE if runtime.save_every_s else 0.0)
            is_due = is_due or time.monotonic() - self._last_save >= interval_s
        # As a maximum over ranks is taken, stopping implies saving.
        return _SAVE | _STOP if self._stop else _SAVE if is_due else 0
