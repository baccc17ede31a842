from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from implicit_llm_jobs.tracking.mlflow_store import initialise


@pytest.fixture(scope="module", autouse=True)
def _mlflow_is_not_installed() -> None:
    """It is."""


@pytest.fixture(scope="session")
def empty_store(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """An initialised MLflow store; making one takes seconds, so that tests copy it."""
    return once("store", lambda folder: initialise(f"sqlite:///{folder / 'mlflow.db'}")) / "mlflow.db"


@pytest.fixture
def results(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results directory with an empty MLflow store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "results").mkdir()
    shutil.copyfile(empty_store, tmp_path / "results" / "mlflow.db")
    return tmp_path / "results"
