"""Small experiments as files that tests change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workflow.experiments import TINY, ExperimentFile
from tests.unit.workflow.language_experiments import LANGUAGE


@pytest.fixture
def tiny(tmp_path: Path) -> ExperimentFile:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    (tmp_path / "results").mkdir(exist_ok=True)
    return ExperimentFile(path)


@pytest.fixture
def language(tmp_path: Path) -> ExperimentFile:
    path = tmp_path / "language.yaml"
    path.write_text(LANGUAGE)
    (tmp_path / "results").mkdir(exist_ok=True)
    return ExperimentFile(path)
