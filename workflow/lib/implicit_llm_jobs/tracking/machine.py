"""Metrics of the machine while a stage works, in a journal of their own, so that they reach MLflow like all others.

They are MLflow's system metrics, with its names (`system/cpu_utilization_percentage`) and measured by its monitors, but
not written by them: it logs straight to the store, loses what that does not take, and knows nothing of a rebuild.
Measured is the whole node of the first process, other jobs on it included.
"""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.journal import Journal, read_records
from implicit_llm_jobs.tracking.metric_keys import SYSTEM

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
SWITCH, INTERVAL = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"  # MLflow's own
POINTS_PER_TIME = 360  # an hour of 10 s; a run of a day has about 1500 points, one of a week 2200
STOP_WAIT_S = 5.0


class MachineMonitor:
    """Samples from `start` to `stop`, and writes their means; nothing that goes wrong here reaches the stage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._interval_s = INTERVAL_S
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Where MLflow is imported, as nothing reads the metrics without it."""
        if os.environ.get(SWITCH, "true").lower() in ("false", "0"):
            return
        try:
            self._interval_s = max(0.1, float(os.environ.get(INTERVAL, INTERVAL_S)))
            monitors = _monitors()
        except Exception as error:  # no number, or whatever a driver or a container lacks
            log.info("no metrics of the machine: %s", error)
            return
        self._thread = threading.Thread(target=self._watch, args=(monitors,), name="machine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what was measured since the last point."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)

    def _watch(self, monitors: list[Any]) -> None:
        begin = last = time.monotonic()
        journal: Journal | None = None
        try:
            while True:
                is_over = self._is_stopped.wait(self._interval_s)
                for monitor in monitors:
                    monitor.collect_metrics()
                now = time.monotonic()
                # Ever more seldom, so that a long run does not fill the store.
                if is_over or now - last >= max(self._interval_s, (now - begin) / POINTS_PER_TIME) * 0.99:
                    if journal is None:
                        step = _next_step(self._path)
                        journal = Journal(self._path)
                    journal.metrics(step, _means(monitors))
                    step, last = step + 1, now
                if is_over:
                    return
        except Exception as error:
            log.info("no more metrics of the machine: %s", error)
        finally:
            if journal is not None:
                journal.close()


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for kind in (GPUMonitor, ROCMMonitor):
        try:
            monitors.append(kind())
            break
        except Exception as error:  # no such GPU, or its library is not installed
            log.debug("%s: %s", kind.__name__, error)
    monitors[0].collect_metrics()  # the share of the CPUs is that since the call before
    monitors[0].clear_metrics()
    return monitors


def _means(monitors: list[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        values |= {f"{SYSTEM}/{key}": value for key, value in monitor.aggregate_metrics().items()}
        monitor.clear_metrics()
    return values


def _next_step(path: Path) -> int:
    """A later attempt goes on counting."""
    return max((record["step"] + 1 for record in read_records(path)), default=0)
