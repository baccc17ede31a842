"""Write the journal of a running stage to MLflow in a thread, and fill a store from the results of finished runs.

`python -m implicit_llm_jobs.tracking.mlflow_writer results/demo` writes the runs that their jobs did not write
completely. A call of Snakemake ends with this command if there are such runs.

No result depends on MLflow. If MLflow is missing or its store fails, the stage logs this once and continues, and its
points wait in the journal. Most jobs for data sets and reports take less time than an import of MLflow and log no
points while they run, so under Snakemake they do not write to MLflow. A later job that reads such a run writes it, or
else the call of Snakemake does when it ends.
"""

import logging
import shlex
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_jobs.tracking.mlflow_bridge import Bridge, is_complete
from implicit_llm_jobs.tracking.mlflow_store import TrackingError, default_uri, initialise, prepare_environment
from implicit_llm_jobs.tracking.tracked_run import TrackedRun, current_invocation, in_order, works_below

log = logging.getLogger(__name__)


INTERVAL_S = 5.0
WAIT_S = 30.0  # for the store, at the end of a stage
STOP_WAIT_S = 5.0  # after a stop request, because the remaining time may be short
LONG_DATA = "token_shard"  # the only kind of data set that takes hours and logs points while it runs
WITHOUT_POINTS = ("data", "checkpoint", "report", "excerpt")  # stages


class MlflowWriter:
    """A thread that writes the journal of one stage to MLflow, or nothing without a bridge; `open_run` creates it."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
        self._is_asked, self._is_done = threading.Event(), threading.Event()
        self._has_warned = False
        if bridge is not None:
            # A daemon, so that a store that does not respond cannot keep the process from ending.
            threading.Thread(target=self._serve, args=(bridge,), name="mlflow-writer", daemon=True).start()

    def finish(self, wait_s: float | None = None) -> None:
        """Start a last attempt to write the rest and wait for it, at most `wait_s` seconds (None: WAIT_S).

        Log a warning if the attempt does not end in time, unless this writer has logged one before.
        """
        wait_s = WAIT_S if wait_s is None else wait_s
        self._is_asked.set()
        if self._bridge is not None and not self._is_done.wait(wait_s):
            self._warn(f"no answer within {wait_s:g} s")

    def _serve(self, bridge: Bridge) -> None:
        has_brought_inputs = False
        while not self._is_done.is_set():
            is_last = self._is_asked.is_set()
            try:
                if not has_brought_inputs:
                    bring_late_inputs(bridge.run)  # first, because tags name the inputs' MLflow runs
                bridge.bring()
                has_brought_inputs = True
            except Exception as error:  # the tracker must not stop a run, whatever the error is
                self._warn(_reason(error))
            if is_last:
                self._is_done.set()
            self._is_asked.wait(INTERVAL_S)

    def _warn(self, reason: str) -> None:
        if not self._has_warned and self._bridge is not None:
            self._has_warned = True
            log.warning("MLflow: %s; the run goes on, its metrics wait in %s", reason, self._bridge.run.journal)


def open_run(run: TrackedRun) -> MlflowWriter:
    """Return a writer that has started to write the run's journal to MLflow.

    It continues the MLflow run of an earlier attempt, if there is one. It writes nothing if MLflow is not installed, or
    if the run logs no points before its end and a call of Snakemake started it; this call writes the run at its end.
    """
    has_points = run.stage not in WITHOUT_POINTS or run.config.get("kind") == LONG_DATA
    if not has_points and current_invocation() is not None:
        return MlflowWriter(None)
    prepare_environment()
    try:
        # Import here, not in the thread, because the stage may import torch at the same time and find a partial module.
        import mlflow  # noqa: F401
    except ImportError:
        log.info("mlflow is not installed; metrics stay in %s", run.journal)
        return MlflowWriter(None)
    return MlflowWriter(Bridge(run))


def catch_up(run: TrackedRun) -> None:
    """Write to MLflow what it lacks of a finished run, for example because the store had failed."""
    if not is_complete(run.work):
        open_run(run).finish()


def bring_late_inputs(run: TrackedRun) -> None:
    """Write the run's inputs that MLflow lacks, each after its own inputs; stop at the first error and log it."""
    for given in in_order(work for work in run.inputs.values() if not is_complete(work)):
        if is_complete(given.work):
            continue
        try:
            Bridge(given).bring()
        except Exception as error:  # the run itself reports a store that it cannot reach
            log.info("%s: not brought to MLflow: %s", given.title, _reason(error))
            return


def _reason(error: Exception) -> str:
    """Return the error as one line, without a password that MLflow's errors may contain."""
    return without_password(f"{type(error).__name__}: {error}").partition("\n")[0][:300]


@dataclass(frozen=True)
class Rebuilt:
    """The result of `rebuild`; `failed`: names of runs whose files or store raised an error."""

    uri: str
    num_runs: int
    failed: tuple[str, ...]


def rebuild(results: Path) -> Rebuilt:
    """Write every run below `results` to the store, which is created if necessary.

    Runs that the store has keep their ids; other runs get new ids and the same tags. You can repeat this, also while
    jobs run. Raises: TrackingError, StorageError; the last error if all runs fail.
    """
    if not results.is_dir():
        raise TrackingError(f"{results}: no such directory; give that of the results with --results")
    uri = default_uri(results)
    works = works_below(results)
    runs, below = list(in_order(works)), set(works)
    if elsewhere := next((run for run in runs if run.work in below and run.uri != uri), None):
        folder = elsewhere.config_dir.parent
        raise TrackingError(
            f"{results}: is not the directory of the results; type --results {shlex.quote(str(folder))}"
        )
    initialise(uri, is_deep=True)
    failed = _bring(runs)
    return Rebuilt(uri, len(runs) - len(failed), failed)


def late_works(experiment: Path) -> list[Path]:
    """Return the work directories below results/<experiment> whose journals are not completely in MLflow."""
    return [work for work in works_below(experiment) if not is_complete(work)]


def bring_late(experiment: Path) -> None:
    """Write the runs of `late_works` to MLflow. Raises: the last error if all runs fail."""
    late = late_works(experiment)
    _bring([run for run in in_order(late) if run.work in late])


def _bring(runs: Sequence[TrackedRun]) -> tuple[str, ...]:
    """Write the runs and return the titles of those that failed. Raises: the last error if all runs fail."""
    failed: list[str] = []
    for run in tqdm(runs, desc="runs", disable=None):
        try:
            Bridge(run).bring()
        except Exception as error:  # one damaged journal must not prevent the others
            log.warning("%s: not brought to MLflow: %s", run.title, _reason(error))
            failed.append(run.title)
            if len(failed) == len(runs):
                raise
    return tuple(failed)


if __name__ == "__main__":
    bring_late(Path(sys.argv[1]).absolute())
