"""What counts as the code of a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from implicit_llm_workflow.planning.code_digest import (
    PACKAGES,
    code_digest,
    job_code,
    job_sources,
    reached_sources,
    resource_digests,
    stage_module,
)
from implicit_llm_workflow.planning.project_sources import Project, SourceError
from implicit_llm_workflow.project_dirs import REPORT, package_dir

FILES = {
    "__init__.py": "from library.models.preset import load_preset\nfrom library.solver.config import Settings\n",
    "models/__init__.py": "",
    "models/preset.py": "from library.models import block\n\ndef load_preset():\n    return block.build()\n",
    "models/block.py": "def build():\n    from ..solver import fixed_point\n    return fixed_point.solve\n",
    "solver/__init__.py": "from .fixed_point import solve\nfrom .config import Settings\n",
    "solver/fixed_point.py": "def solve():\n    '''Solve.'''\n    return 1  # one\n",
    "solver/config.py": "class Settings:\n    tau = 0.8\n",
    "data/__init__.py": "",
    "data/stage.py": "import numpy\nfrom library.data.groups import table\nfrom library.runs.stage import run_stage\n",
    "data/groups.py": "def table():\n    return []\n",
    "runs/__init__.py": "",
    "runs/stage.py": "from library.tracking import journal\n\ndef run_stage():\n    pass\n",
    "tracking/__init__.py": "",
    "tracking/journal.py": "",
    "train/__init__.py": "",
    "train/stage.py": "import library\nfrom library.data import groups\n",
    "score/__init__.py": "",
    "score/stage.py": (
        "from library import Settings\nimport importlib\n\ndef late():\n"
        "    importlib.import_module('.extra', __package__)\n"
    ),
    "score/extra.py": "",
    "score/typed.py": "",
    "report/__init__.py": "",
    "report/stage.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from library.score import typed\n"
        "else:\n    import library.score.extra\n"
    ),
    "report/page.html": "<p>",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "library"


@pytest.fixture
def digest(library: Path) -> Callable[[str], str]:
    return lambda stage: code_digest(f"library.{stage}.stage", Project({"library": library}), ["library.runs"])


def reached(library: Path, stage: str) -> set[str]:
    sources = reached_sources(f"library.{stage}.stage", Project({"library": library}), ["library.runs"])
    return {name.removeprefix("library.") for name in sources}


def test_imports_are_followed_through_modules_but_not_into_the_plumbing(library: Path) -> None:
    assert reached(library, "data") == {"data.stage", "data.groups"}


def test_importing_the_library_reaches_everything_its_init_imports(library: Path) -> None:
    everything = {"models.preset", "models.block", "solver.fixed_point", "solver.config"}
    assert reached(library, "train") == {"train.stage", "data.groups", *everything}


def test_a_name_taken_from_a_package_counts_where_it_is_defined(library: Path) -> None:
    assert reached(library, "score") == {"score.stage", "score.extra", "solver.config"}


def test_imports_for_type_checkers_do_not_count(library: Path) -> None:
    assert reached(library, "report") == {"report.stage", "score.extra"}


def test_comments_docstrings_and_layout_do_not_count(library: Path, digest: Callable[[str], str]) -> None:
    before = digest("train")
    (library / "solver" / "fixed_point.py").write_text(
        '"""Module."""\n\n\ndef solve():\n    """Other."""\n\n    return (1)\n'
    )
    assert digest("train") == before


def test_code_counts_for_the_stages_that_reach_it_alone(library: Path, digest: Callable[[str], str]) -> None:
    before = {stage: digest(stage) for stage in ("data", "train", "score")}
    (library / "solver" / "fixed_point.py").write_text("def solve():\n    return 2\n")
    changed = {stage for stage, old in before.items() if digest(stage) != old}
    assert changed == {"train"}


@pytest.mark.parametrize(
    "new", ["def solve(a=1):\n    return 1\n", "def solve():\n    return '1'\n", "def solve():\n    return -1\n"]
)
def test_every_change_of_meaning_counts(library: Path, digest: Callable[[str], str], new: str) -> None:
    before = digest("train")
    (library / "solver" / "fixed_point.py").write_text(new)
    assert digest("train") != before


def test_a_renamed_module_counts(library: Path, digest: Callable[[str], str]) -> None:
    before = digest("data")
    (library / "data" / "groups.py").rename(library / "data" / "tables.py")
    stage = library / "data" / "stage.py"
    stage.write_text(stage.read_text().replace("data.groups", "data.tables"))
    assert digest("data") != before


def test_what_an_init_holds_besides_imports_does_not_count(library: Path, digest: Callable[[str], str]) -> None:
    before = digest("train")
    with open(library / "__init__.py", "a") as file:
        file.write("\n__all__ = ['load_preset']\n")
    assert digest("train") == before


def test_a_template_beside_a_module_counts(library: Path, digest: Callable[[str], str]) -> None:
    before = digest("report")
    (library / "report" / "page.html").write_text("<b>")
    assert digest("report") != before


def test_claims_and_captions_count_for_the_report_alone() -> None:
    counted = resource_digests(job_sources(job_code("report", {})).values())
    assert {f"{REPORT}/claims/claims.yaml", f"{REPORT}/registry.yaml"} <= counted.keys()
    data = job_sources(job_code("data", {"kind": "word_problem"}))
    assert not any(name.startswith(REPORT) for name in (*data, *resource_digests(data.values())))


def test_modules_that_import_each_other_are_no_trap(library: Path, digest: Callable[[str], str]) -> None:
    (library / "data" / "groups.py").write_text("from library.data import stage\n")
    assert digest("data")


def test_a_syntax_error_is_named_with_its_line(library: Path, digest: Callable[[str], str]) -> None:
    (library / "data" / "groups.py").write_text("x = 1\ndef broken(:\n")
    with pytest.raises(SourceError, match=r"groups\.py:2: is not valid Python"):
        digest("data")


def test_a_stage_that_is_not_there_is_named(library: Path, digest: Callable[[str], str]) -> None:
    with pytest.raises(SourceError, match=r"no module library\.nothing\.stage"):
        digest("nothing")


def test_the_solver_is_code_of_training_and_evaluation_but_not_of_data() -> None:
    project = Project({name: package_dir(name) for name in PACKAGES})
    configs: dict[str, dict[str, str]] = {
        "data": {"kind": "word_problem"},
        "train": {},
        "evaluate": {"kind": "word_problem"},
    }
    reached_by = {stage: reached_sources(stage_module(stage, config), project) for stage, config in configs.items()}
    solver = "implicit_llm.solver.fixed_point"
    assert [solver in reached_by[stage] for stage in ("data", "train", "evaluate")] == [False, True, True]
    assert "implicit_llm.models.mamba2" in reached_by["train"]
