from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from implicit_llm_contracts.runs import faults
from tests.unit.training.small_runs import Inject, Undisturbed, make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the training set."""
    return make_data(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), data)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Run directory of the one phase of a test."""
    return tmp_path / "a" / "only"


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
