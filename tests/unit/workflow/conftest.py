"""A small experiment as a file that tests change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workflow.experiments import TINY, ExperimentFile


@pytest.fixture
def tiny(tmp_path: Path) -> ExperimentFile:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return ExperimentFile(path)
