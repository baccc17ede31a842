from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from implicit_llm_contracts.runs import faults
from tests.unit.training.small_runs import Inject, Undisturbed, make_data


@pytest.fixture(scope="session", autouse=True)
def _garbage_is_frozen() -> None:
    gc.collect()
    gc.freeze()  # the Trainer collects garbage at every start, and would walk through all modules that are imported


@contextmanager
def without_mlflow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # what makes `import mlflow` an ImportError
        yield


@pytest.fixture(scope="module", autouse=True)
def _mlflow_is_not_installed() -> Iterator[None]:
    """A stage works without MLflow, and these tests are not about it; those of other folders that follow are."""
    with without_mlflow():
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the training set."""
    with without_mlflow():
        return make_data(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), data)


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """Makes a context in which the fault `point:kind@hit` strikes."""

    @contextmanager
    def struck_by(fault: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(faults, "_hits", Counter())
            patch.setenv("FAULT", fault)
            yield

    return struck_by
