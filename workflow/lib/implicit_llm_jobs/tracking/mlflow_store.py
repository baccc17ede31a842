"""Find the store of MLflow's runs, and create an empty SQLite store once.

`python -m implicit_llm_jobs.tracking.mlflow_store results` creates it; Snakemake runs this before its first job.
"""

import fcntl
import logging
import os
import shlex
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import fsync_file, remove_temporary, storage_errors, temporary_name
from implicit_llm_contracts.runs.logs import at_level

SQLITE = "sqlite:///"
_QUOTED = "sqlite+pysqlite:///file:"  # names the driver, because MLflow creates a folder `file:` for SQLITE
# Defaults for MLflow. Its telemetry uses the internet, which a cluster's jobs should avoid. Without a pool each call
# opens the store again, and so finds a new store that replaced a damaged one. We retry a failed request every few
# seconds, so MLflow itself need not wait long.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


class TrackingError(UserError):
    """The MLflow store cannot be created or used."""


def prepare_environment() -> None:
    """Set defaults for MLflow's environment variables; call this before MLflow is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # MLflow would log the password in the URI


def default_uri(results: Path) -> str:
    """Return `MLFLOW_TRACKING_URI`, or by default the URI of the SQLite store in `results`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(results.resolve() / "mlflow.db")


def sqlite_uri(path: Path) -> str:
    """Return the URI of an SQLite store; a path with a `?` is quoted, as SQLAlchemy would parse options after it."""
    return f"{SQLITE}{path}" if "?" not in str(path) else f"{_QUOTED}{quote(str(path))}?uri=true"


def artifact_location(uri: str) -> str | None:
    """Return the URI of a folder beside an SQLite store for a new experiment's artifacts; None lets a server choose."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlflow-artifacts").resolve().as_uri()


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite store, or None for other stores."""
    path = uri.partition("?")[0]
    if path.startswith(_QUOTED):
        return Path(unquote(path.removeprefix(_QUOTED)))
    return Path(path.removeprefix(SQLITE)) if path.startswith(SQLITE) else None


def initialise(uri: str, *, is_deep: bool = False) -> None:
    """Create the SQLite store if it is missing; a server manages other stores. Many processes may call this.

    is_deep: whether to check every page of an existing store.
    Raises: TrackingError for a file that is damaged, in use or not an MLflow store, or if MLflow is not installed;
    StorageError if the store cannot be written.
    """
    path = sqlite_path(uri)
    if path is None:
        return
    # Processes that create the tables of one store at the same time make each other crash, so only one creates them.
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_name(f".{path.name}.lock")):
            if not _is_store(path, is_deep=is_deep):
                _create(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for a lock on the file `path` and hold it; it excludes other processes, but not threads of this process."""
    faults.point("tracker.before_lock")
    # `lockf`, because a data worker that is forked meanwhile would keep a lock of `flock`.
    with open(path, "a", encoding="utf-8") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def quiet() -> AbstractContextManager[None]:
    """Suppress MLflow's own log lines; its errors reach us as exceptions."""
    return at_level(logging.CRITICAL, "mlflow", "alembic", "sqlalchemy", "urllib3")


def _is_store(path: Path, *, is_deep: bool) -> bool:
    """Return whether the file is an MLflow store; False if it is missing or empty.

    is_deep: also check its integrity. Raises: TrackingError if it is damaged, in use, or not an MLflow store.
    """
    if not path.exists() or path.stat().st_size == 0:
        return False
    try:
        # Not read-only: SQLite must be able to roll back the unfinished transaction of a killed process.
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=60)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = "ok" if {"alembic_version", "experiments", "runs", "metrics"} <= tables else "another database"
            if is_deep and found == "ok":
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        raise TrackingError(f"{path}: cannot open the MLflow store ({error}); try again when it is free") from error
    except sqlite3.DatabaseError as error:
        found = f"no SQLite database ({error})"
    if found != "ok":
        store, aside, results = (shlex.quote(str(name)) for name in (path, f"{path}.bad", path.parent))
        anew = f"mv {store} {aside} && implicit-llm mlflow rebuild --results {results}"
        raise TrackingError(f"{path}: expected an MLflow store, found {found}; to fill a new one, type `{anew}`")
    return True


def _create(path: Path) -> None:
    """Create the store in a temporary file and rename it to `path`, so that no incomplete store has this name."""
    prepare_environment()
    try:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    except ImportError as error:
        raise TrackingError("mlflow is not installed; type `pip install mlflow`") from error
    tmp = temporary_name(path)
    try:
        faults.point("mlflow_store.before_create")
        with quiet():
            store = SqlAlchemyStore(sqlite_uri(tmp), artifact_location(sqlite_uri(path)))
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
