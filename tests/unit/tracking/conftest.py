from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from implicit_llm.tracking.mlflow_writer import initialise


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised MLflow store; making one takes seconds, so that tests copy it."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    initialise(f"sqlite:///{path}")
    return path


@pytest.fixture
def results(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results directory with an empty MLflow store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "results").mkdir()
    shutil.copyfile(empty_store, tmp_path / "results" / "mlflow.db")
    return tmp_path / "results"
