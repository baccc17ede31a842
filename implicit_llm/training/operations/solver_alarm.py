"""A warning when the solver does not find fixed points any more; training goes on."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence

from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import Journal

log = logging.getLogger(__name__)

_QUIET_WINDOWS = 10  # between the first alarm and the second; then each pause is twice the one before


class SolverAlarm:
    """Watches means over a window of steps; speaks now and then, in the log and as the event `solver_alarm`."""

    def __init__(self, runtime: Runtime, journal: Journal) -> None:
        limits = {"unconverged_share": runtime.alarm_unconverged_share, "residual": runtime.alarm_residual}
        self._limits = {key: limit for key, limit in limits.items() if limit is not None}
        self._rows: deque[Mapping[str, float]] = deque(maxlen=runtime.alarm_window_steps)
        self._journal = journal
        self._quiet_until = 0
        self._pause_steps = _QUIET_WINDOWS * runtime.alarm_window_steps

    def observe(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Take the metrics of the steps that end with `step`; those of explicit and unrolled phases say nothing."""
        self._rows.extend(rows)
        if len(self._rows) < (self._rows.maxlen or 0) or step < self._quiet_until:
            return
        means = {key: sum(row[key] for row in self._rows) / len(self._rows) for key in self._limits}
        found = {key: mean for key, mean in means.items() if mean > self._limits[key]}  # never so for NaN
        if not found:
            return
        self._quiet_until, self._pause_steps = step + self._pause_steps, 2 * self._pause_steps
        log.warning(
            "step %d: the solver does not converge: over the last %d steps %s; raise solver.max_iter or solver.tol, "
            "or lower the learning rate (training goes on)",
            step,
            len(self._rows),
            " and ".join(f"{key} is {mean:.3g} (limit {self._limits[key]:g})" for key, mean in found.items()),
        )
        self._journal.event("solver_alarm", step=step, window_steps=len(self._rows), **found)
