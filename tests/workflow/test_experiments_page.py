"""docs/experiments.md: its files and commands, as a reader would write and type them."""

import re
from pathlib import Path

import pytest

from tests.pages import ROOT, commands_of
from tests.workflow.tiny_project import LIBRARY, Project

NAME = "docs/experiments.md"
PAGE = (ROOT / NAME).read_text(encoding="utf-8")
FILES = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = commands_of(NAME)
INIT, *LOOKS = COMMANDS[:4]
RUN, HEADLINE, EXPLAIN = COMMANDS[4:]


def typed(folder: Path, words: list[str]) -> str:
    return Project(folder, LIBRARY).command(*words)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder with the files of the page."""
    typed(tmp_path, INIT)
    folder = tmp_path / INIT[-1]
    for name, text in FILES:
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def test_the_files_of_the_page_plan_what_it_says(study: Path) -> None:
    nodes, estimate, dry_run = (typed(study, words) for words in LOOKS)
    waiting = re.findall(r"^\S+  +waiting ", nodes, re.MULTILINE)
    assert len(waiting) == len(set(re.findall(r"output: (\S+)/manifest\.json", dry_run))) > 15
    assert "z60-implicit" in estimate


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_experiment_of_the_page_runs_and_a_change_reruns_the_free_phases(study: Path) -> None:
    experiment = study / "workflow" / "config" / "solvable.yaml"
    experiment.write_text(experiment.read_text().replace("total_steps: 2000", "total_steps: 200"))
    typed(study, RUN)
    assert "z60-explicit" in typed(study, HEADLINE)
    assert (study / "results" / "solvable" / "report" / "index.html").is_file()
    curriculum = study / "workflow" / "config" / "curricula" / "short-bounded.yaml"
    curriculum.write_text(curriculum.read_text().replace("tol: 0.05", "tol: 0.02"))
    stale = re.findall(r"^(\S+) +stale", typed(study, EXPLAIN), re.MULTILINE)
    runs = [f"{group}-implicit-s0/free" for group in ("a5", "z60")]
    assert sorted(stale) == sorted(
        [*(f"train/{run}" for run in runs), *(f"evaluate/{run}/word-problem" for run in runs), "report"]
    )
