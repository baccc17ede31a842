"""One Slurm for all tests of this folder, and a project for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster, slurm  # noqa: F401
from toy_project import ToyProject


@pytest.fixture
def on_slurm(slurm: SlurmCluster, tmp_path: Path) -> Iterator[ToyProject]:  # noqa: F811
    slurm.resume_nodes()
    project = ToyProject(tmp_path / "toy", slurm)
    yield project
    project.stop()


@pytest.fixture
def on_this_machine(tmp_path: Path) -> Iterator[ToyProject]:
    project = ToyProject(tmp_path / "toy")
    yield project
    project.stop()
