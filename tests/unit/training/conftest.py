from pathlib import Path

import pytest

from tests.unit.training.small_runs import Undisturbed, make_data


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
