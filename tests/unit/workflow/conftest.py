"""Small experiments as files that tests change."""

from pathlib import Path

import pytest

from implicit_llm_workflow.planning.plan import Plan
from tests.unit.workflow.experiments import LANGUAGE, TINY, ExperimentFile, finish


def written(folder: Path, name: str, text: str) -> ExperimentFile:
    (folder / "results").mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return ExperimentFile(folder / name)


@pytest.fixture
def tiny(tmp_path: Path) -> ExperimentFile:
    return written(tmp_path, "tiny.yaml", TINY)


@pytest.fixture
def language(tmp_path: Path) -> ExperimentFile:
    return written(tmp_path, "language.yaml", LANGUAGE)


@pytest.fixture
def plan(tiny: ExperimentFile) -> Plan:
    return tiny.plan()


@pytest.fixture
def finished(tiny: ExperimentFile) -> ExperimentFile:
    finish(tiny.plan())
    return tiny
