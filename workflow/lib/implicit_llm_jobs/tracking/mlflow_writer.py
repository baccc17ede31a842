"""MLflow beside a running stage: a thread that brings the journal to the store every few seconds. And a store is made
to show what the results hold: all of it after a loss or an outage, or what jobs have left to do.

`python -m implicit_llm_jobs.tracking.mlflow_writer results/demo` does the latter: a call of Snakemake ends with it.

Nothing depends on it. Without MLflow, or while the store fails, the stage goes on after one warning, and its points
wait in the journal. Importing MLflow takes longer than most data sets and reports, which have no points on the way: the
jobs that read them bring them, or else the call of Snakemake that made them, when it ends.
"""

import logging
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
WAIT_S = 30.0  # for the store at the end of a stage
STOP_WAIT_S = 5.0  # when the stage was asked to stop: the time it has left is for others to use
LONG_DATA = "token_shard"  # the one kind of data set that takes hours and writes points on the way


class MlflowWriter:
    """The thread of one stage; made by `open_run`."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
        self._is_asked, self._is_done = threading.Event(), threading.Event()
        self._has_warned = False
        if bridge is not None:
            # A daemon: a store that does not answer must not keep the process from ending.
            threading.Thread(target=self._serve, args=(bridge,), name="mlflow-writer", daemon=True).start()

    def finish(self, wait_s: float | None = None) -> None:
        """Bring the rest, for at most so many seconds, by default WAIT_S, and end the thread."""
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
                    bring_late_inputs(bridge.run)  # first, so that the run is tagged with theirs
                bridge.bring()
                has_brought_inputs = True
            except Exception as error:  # whatever it is: the tracker stops no run
                self._warn(_reason(error))
            if is_last:
                self._is_done.set()
            self._is_asked.wait(INTERVAL_S)

    def _warn(self, reason: str) -> None:
        if not self._has_warned and self._bridge is not None:
            self._has_warned = True
            log.warning("MLflow: %s; the run goes on, its metrics wait in %s", reason, self._bridge.run.journal)


def open_run(run: TrackedRun) -> MlflowWriter:
    """Start bringing the journal of `run` to its MLflow run, the same as before if it was begun before.

    A run without points on the way leaves that to the call of Snakemake that it is a job of.
    """
    has_points = run.stage not in ("data", "report") or run.config.get("kind") == LONG_DATA
    if not has_points and current_invocation() is not None:
        return MlflowWriter(None)
    prepare_environment()
    try:
        # Here and not in the thread: a stage that imports torch at the same time must not meet a half-made module.
        import mlflow  # noqa: F401
    except ImportError:
        log.info("mlflow is not installed; metrics stay in %s", run.journal)
        return MlflowWriter(None)
    return MlflowWriter(Bridge(run))


def catch_up(run: TrackedRun) -> None:
    """Bring what an earlier process of a finished run could not bring."""
    if not is_complete(run.work):
        open_run(run).finish()


def bring_late_inputs(run: TrackedRun) -> None:
    """Bring the finished runs that this one reads, directly or not, and that MLflow does not know all of."""
    for given in in_order(work for work in run.inputs.values() if not is_complete(work)):
        if is_complete(given.work):
            continue
        try:
            Bridge(given).bring()
        except Exception as error:  # the run itself says so when the store is out of reach
            log.info("%s: not brought to MLflow: %s", given.title, _reason(error))
            return


def _reason(error: Exception) -> str:
    """One line, without the password that MLflow's errors may hold."""
    return without_password(f"{type(error).__name__}: {error}").partition("\n")[0][:300]


@dataclass(frozen=True)
class Rebuilt:
    """`failed`: names of runs whose files or store refused."""

    uri: str
    num_runs: int
    failed: tuple[str, ...]


def rebuild(results: Path) -> Rebuilt:
    """Bring every run below `results` to the store, which is made if there is none.

    Runs that the store has keep their ids; the others get new ones, with the same tags. May be repeated, and done
    while jobs run. Raises: TrackingError, StorageError; when no run can be brought, what the last one raised.
    """
    if not results.is_dir():
        raise TrackingError(f"{results}: no such directory; give that of the results with --results")
    uri = default_uri(results)
    initialise(uri, is_deep=True)
    runs = list(in_order(works_below(results)))
    failed = _bring(runs)
    return Rebuilt(uri, len(runs) - len(failed), failed)


def late_works(experiment: Path) -> list[Path]:
    """Work directories below results/<experiment> whose journals MLflow does not have, or not all of them."""
    return [work for work in works_below(experiment) if not is_complete(work)]


def bring_late(experiment: Path) -> None:
    """Send MLflow the runs below results/<experiment> that left it to the call of Snakemake. Raises: as `rebuild`."""
    late = late_works(experiment)
    _bring([run for run in in_order(late) if run.work in late])


def _bring(runs: Sequence[TrackedRun]) -> tuple[str, ...]:
    """Titles of the runs that could not be brought. Raises: the last error, if all could not."""
    failed: list[str] = []
    for run in tqdm(runs, desc="runs", disable=None):
        try:
            Bridge(run).bring()
        except Exception as error:  # one damaged journal is no reason to leave out the others
            log.warning("%s: not brought to MLflow: %s", run.title, _reason(error))
            failed.append(run.title)
            if len(failed) == len(runs):
                raise
    return tuple(failed)


if __name__ == "__main__":
    bring_late(Path(sys.argv[1]).absolute())
