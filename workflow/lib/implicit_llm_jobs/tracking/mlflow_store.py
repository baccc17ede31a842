"""Where MLflow keeps its runs, and how an empty SQLite store is made once.

`python -m implicit_llm_jobs.tracking.mlflow_store results` makes it: Snakemake does so before its first job.
"""

import fcntl
import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

from implicit_llm_contracts.runs import UserError, faults, fsync_file, remove_temporary, storage_errors, temporary_name

SQLITE = "sqlite:///"
# Of MLflow, where they are not set. Its report of use goes to the internet, which a cluster's jobs should leave alone.
# Without a pool each call opens the store anew, and so finds one that was made in place of a damaged one. What a call
# to a server could not do is tried again here, every few seconds, and does not have to wait long in MLflow.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_NOISY = ("mlflow", "alembic", "sqlalchemy", "urllib3")

log = logging.getLogger(__name__)


class TrackingError(UserError):
    """The MLflow store cannot be made or used."""


class DamagedStore(TrackingError):
    """The file of the store is none."""


def prepare_environment() -> None:
    """Set what MLflow reads from the environment; call it before MLflow is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def default_uri(results: Path) -> str:
    """`MLFLOW_TRACKING_URI`, else the SQLite store in `results`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{results.resolve() / 'mlflow.db'}"


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps artifacts: beside an SQLite store; a server decides by itself (None)."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlflow-artifacts").resolve().as_uri()


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite store, None for other stores."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]) if uri.startswith(SQLITE) else None


def initialise(uri: str, is_repair: bool = False) -> Path | None:
    """Make the SQLite store if there is none yet; other stores are left to their server. Many processes may call it.

    `is_repair`: look at every page, and move a damaged file aside, to *.bad-<n>. Returns: its new name, if it did.
    Raises: DamagedStore for a file that is no MLflow store, StorageError when it cannot be written.
    """
    path = sqlite_path(uri)
    if path is None:
        return None
    aside = None
    with _locked(path):
        try:
            is_store = _is_store(path, is_deep=is_repair)
        except DamagedStore as error:
            if not is_repair:
                raise
            is_store, aside = False, _set_aside(path)
            log.warning("%s; moved to %s", str(error).partition(";")[0], aside.name)
        if not is_store:
            _create(path)
    return aside


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes out, by a lock on the file `path`."""
    faults.point("tracker.before_lock")
    # Not flock: a data worker, forked in between, would hold that on.
    with open(path, "a", encoding="utf-8") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's own log lines away: what goes wrong reaches us as an exception."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Processes that create the tables of one store at the same time crash each other: one does, the others wait.
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_name(f".{path.name}.lock")):
            yield


def _is_store(path: Path, is_deep: bool = False) -> bool:
    """Whether the store was made; `is_deep` looks at every page.

    Raises: DamagedStore for another or a damaged file, TrackingError for one that cannot be opened now.
    """
    if not path.exists() or path.stat().st_size == 0:
        return False
    try:
        # Not read-only: what a killed process has left of a transaction is rolled back by the next one that may write.
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=60)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if is_deep else "ok"
    except sqlite3.OperationalError as error:
        raise TrackingError(f"{path}: cannot open the MLflow store ({error}); try again when it is free") from error
    except sqlite3.DatabaseError as error:
        raise DamagedStore(f"{path}: expected an SQLite database, found none ({error}); {_advice(path)}") from error
    if not {"alembic_version", "experiments", "runs", "metrics"} <= tables:
        raise DamagedStore(f"{path}: expected an MLflow store, found another database; {_advice(path)}")
    if found != "ok":
        raise DamagedStore(f"{path}: the SQLite database is damaged ({found}); {_advice(path)}")
    return True


def _advice(path: Path) -> str:
    return f"type `implicit-llm mlflow rebuild --results {path.parent}`"


def _set_aside(path: Path) -> Path:
    """Rename the store, and what SQLite may have left beside it, to the first free name; nothing is replaced."""
    number = next(n for n in count(1) if not path.with_name(f"{path.name}.bad-{n}").exists())
    for suffix in ("-journal", "-wal", "-shm", ""):
        source = path.with_name(path.name + suffix)
        if source.exists():
            os.rename(source, path.with_name(f"{path.name}.bad-{number}{suffix}"))
    return path.with_name(f"{path.name}.bad-{number}")


def _create(path: Path) -> None:
    """Make the tables in a temporary file and rename it: a store that exists is complete."""
    prepare_environment()
    try:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    except ImportError as error:
        raise TrackingError("mlflow is not installed; type `pip install mlflow`") from error
    tmp = temporary_name(path)
    try:
        faults.point("mlflow_store.before_create")
        with quiet():
            store = SqlAlchemyStore(f"{SQLITE}{tmp}", artifact_location(f"{SQLITE}{path}"))
            store.engine.dispose()
        fsync_file(tmp)
        faults.point("mlflow_store.before_rename")
        os.rename(tmp, path)
        fsync_file(path.parent)
    finally:
        remove_temporary(tmp)


if __name__ == "__main__":
    try:
        initialise(default_uri(Path(sys.argv[1])))
    except UserError as error:
        sys.exit(str(error))
