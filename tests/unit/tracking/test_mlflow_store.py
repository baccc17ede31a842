from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from implicit_llm_jobs.tracking.mlflow_store import initialise


def test_a_transaction_that_a_killed_process_left_is_rolled_back(tmp_path: Path, empty_store: Path) -> None:
    (tmp_path / "dying").mkdir()
    path = shutil.copyfile(empty_store, tmp_path / "dying" / "mlflow.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE half_made (text TEXT)")
        connection.executemany("INSERT INTO half_made VALUES (?)", [("x" * 2000,)] * 200)
        left = shutil.copytree(path.parent, tmp_path / "left") / "mlflow.db"
        assert left.with_name("mlflow.db-journal").stat().st_size > 0
    initialise(f"sqlite:///{left}")
    assert not left.with_name("mlflow.db-journal").exists()
    with closing(sqlite3.connect(left)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'half_made'").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
