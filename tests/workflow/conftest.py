"""The small experiment, finished once for all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workflow.tiny_project import Project, make_project, project_in


@pytest.fixture(scope="session")
def built(once: Callable[[str, Callable[[Path], object]], Path], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished experiment. Not to be changed: take `project` for that."""
    folder = once("tiny", lambda folder: make_project(folder).snakemake())
    return project_in(folder).copy_to(tmp_path_factory.mktemp("built") / "tiny")


@pytest.fixture
def project(built: Project, tmp_path: Path) -> Project:
    """A copy of the finished experiment of one's own, file times kept."""
    return built.copy_to(tmp_path / "copy")


@pytest.fixture
def fresh(tmp_path: Path) -> Project:
    """The experiment before its first run."""
    return make_project(tmp_path)
