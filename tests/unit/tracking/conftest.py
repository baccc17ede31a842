import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _mlflow_is_not_installed() -> None:
    """It is."""


@pytest.fixture
def results(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results directory with an empty MLflow store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "results").mkdir()
    shutil.copyfile(empty_store, tmp_path / "results" / "mlflow.db")
    return tmp_path / "results"
