"""One Slurm for all tests of this folder, and a project for each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, why_not
from tests.slurm.toy_project import ToyProject


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A running Slurm; skips where none can be started."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as root, SlurmCluster(Path(root)) as cluster:
        yield cluster


@pytest.fixture
def on_slurm(slurm: SlurmCluster, tmp_path: Path) -> Iterator[ToyProject]:
    slurm.resume_nodes()
    project = ToyProject(tmp_path / "toy", slurm)
    yield project
    project.stop()


@pytest.fixture
def on_this_machine(tmp_path: Path) -> Iterator[ToyProject]:
    project = ToyProject(tmp_path / "toy")
    yield project
    project.stop()
