"""Where MLflow keeps its runs, and how an empty SQLite store is made once."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from implicit_llm.runs.atomic import fsync_file, remove_temporary, storage_errors, temporary_name
from implicit_llm.runs.errors import UserError
from implicit_llm.testing import faults

SQLITE = "sqlite:///"
_NOISY = ("mlflow", "alembic", "sqlalchemy")


class TrackingError(UserError):
    """The MLflow store cannot be made or used."""


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


def initialise(uri: str) -> None:
    """Make the SQLite store if there is none yet; other stores are left to their server. Many processes may call it.

    Raises: TrackingError for a file that is no MLflow store, StorageError when it cannot be written.
    """
    path = sqlite_path(uri)
    if path is None:
        return
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        faults.point("mlflow_store.before_lock")
        # Processes that create the tables of one store at the same time crash each other: one does, the others wait.
        with open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_store(path):
                _create(path)


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


def _is_store(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    advice = f"type `mv {path} {path}.bad` and `implicit-llm mlflow init`"
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as error:
        raise TrackingError(f"{path}: cannot open the MLflow store ({error}); try again when it is free") from error
    except sqlite3.DatabaseError as error:
        raise TrackingError(f"{path}: expected an SQLite database, found none ({error}); {advice}") from error
    if not {"alembic_version", "experiments", "runs", "metrics"} <= tables:
        raise TrackingError(f"{path}: expected an MLflow store, found another database; {advice}")
    return True


def _create(path: Path) -> None:
    """Make the tables in a temporary file and rename it: a store that exists is complete."""
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
