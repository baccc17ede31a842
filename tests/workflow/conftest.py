"""The small experiment, finished once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workflow.tiny_project import Project, make_project


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished experiment. Not to be changed: take `project` for that."""
    project = make_project(tmp_path_factory.mktemp("tiny"))
    project.snakemake()
    return project


@pytest.fixture
def project(built: Project, tmp_path: Path) -> Project:
    """A copy of the finished experiment of one's own, file times kept."""
    return built.copy_to(tmp_path / "copy")
