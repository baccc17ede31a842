"""What counts as the code of a stage, and that it is still the same when a job begins."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from implicit_llm_workflow.file_digests import Remembered
from implicit_llm_workflow.planning import code_digest as digests
from implicit_llm_workflow.planning.code_digest import (
    CodeChanged,
    CodeRecord,
    JobCode,
    Project,
    SourceError,
    SourceModule,
    changed_files,
    code_now,
    file_digests,
    job_code,
    job_digest,
    job_sources,
    parts_of,
    reached_sources,
    read_code_record,
    record_code,
    record_path,
    require_submitted_code,
    resource_digests,
    total_digest,
)
from implicit_llm_workflow.project_dirs import REPORT
from tests.unit.workflow.experiments import ExperimentFile

FILES = {
    "__init__.py": "from library.models.preset import load_preset\nfrom library.solver.config import Settings\n",
    "models/__init__.py": "",
    "models/preset.py": "from library.models import block\n\ndef load_preset():\n    return block.build()\n",
    "models/block.py": "def build():\n    from ..solver import fixed_point\n    return fixed_point.solve\n",
    "solver/__init__.py": "from .fixed_point import solve\nfrom .config import Settings\n",
    "solver/fixed_point.py": "def solve():\n    '''Solve.'''\n    return 1  # one\n",
    "solver/config.py": "class Settings:\n    tau = 0.8\n",
    "data/__init__.py": "from library.data.groups import table\nLIMIT = 3\n",
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
        "    importlib.import_module(late.__name__)\n"
    ),
    "score/extra.py": "",
    "score/typed.py": "",
    "report/__init__.py": "",
    "report/stage.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from library.score import typed\n"
        "else:\n    import library.score.extra\nfrom library.data import LIMIT\n"
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


def digest(library: Path, stage: str = "data", kept: Path | None = None) -> str:
    """As a new process computes it, with what an earlier one left in `kept`."""
    cache = Remembered(kept)
    sources = reached_sources(f"library.{stage}.stage", Project({"library": library}, cache), ["library.runs"])
    found = total_digest(file_digests(sources))
    cache.save()
    return found


EVERYTHING = {"models.preset", "models.block", "solver.fixed_point", "solver.config"}


@pytest.mark.parametrize(
    ("stage", "modules"),
    [
        ("data", {"data.groups"}),  # through modules, but not into the plumbing
        ("train", {"data.groups", *EVERYTHING}),  # `import library`: all that its init imports
        ("score", {"score.extra", "solver.config"}),  # a name counts where it is defined
        ("report", {"score.extra", "data.groups"}),  # without what is for type checkers; a name of `data/__init__.py`
    ],
)
def test_imports_are_followed_to_the_modules_that_count(library: Path, stage: str, modules: set[str]) -> None:
    sources = reached_sources(f"library.{stage}.stage", Project({"library": library}), ["library.runs"])
    assert {name.removeprefix("library.") for name in sources} == {f"{stage}.stage", *modules}


SOLVER = "solver/fixed_point.py"


@pytest.mark.parametrize(
    ("file", "text", "stages"),
    [
        (SOLVER, '"""Module."""\n\n\ndef solve():\n    """Other."""\n\n    return (1)\n', set()),
        (SOLVER, "def solve():\n    return 2\n", {"train"}),
        (SOLVER, "def solve(a=1):\n    return 1\n", {"train"}),
        (SOLVER, "def solve():\n    return '1'\n", {"train"}),
        (SOLVER, "def solve():\n    return -1\n", {"train"}),
        ("__init__.py", FILES["__init__.py"] + "\n__all__ = ['load_preset']\n", set()),
        ("report/page.html", "<b>", {"report"}),
        ("data/groups.py", "from library.data import stage\n", {"data", "train", "report"}),  # a circle
    ],
)
def test_code_counts_for_the_stages_that_reach_it_and_layout_for_none(
    library: Path, file: str, text: str, stages: set[str]
) -> None:
    before = {stage: digest(library, stage) for stage in ("data", "train", "score", "report")}
    (library / file).write_text(text)
    assert {stage for stage, old in before.items() if digest(library, stage) != old} == stages


def test_claims_and_captions_count_for_the_report_alone() -> None:
    counted = resource_digests(job_sources(job_code("report", {})).values())
    assert {f"{REPORT}/claims/claims.yaml", f"{REPORT}/registry.yaml"} <= counted.keys()
    assert sum(name.endswith("claims.yaml") for name in counted) == 1
    data = job_sources(job_code("data", {"kind": "word_problem"}))
    assert not any(name.startswith(REPORT) for name in (*data, *resource_digests(data.values())))


def test_a_syntax_error_is_named_with_its_line(library: Path) -> None:
    (library / "data" / "groups.py").write_text("x = 1\ndef broken(:\n")
    with pytest.raises(SourceError, match=r"groups\.py:2: is not valid Python"):
        digest(library)
    with pytest.raises(SourceError, match=r"no module library\.nothing\.stage"):
        digest(library, "nothing")


def test_an_unchanged_file_is_parsed_once(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(library, kept=tmp_path / "kept")
    parsed: list[str] = []
    tree = SourceModule.tree.func
    monkeypatch.setattr(SourceModule, "tree", property(lambda source: parsed.append(source.module) or tree(source)))
    assert digest(library, kept=tmp_path / "kept") == first
    assert parsed == []
    (library / "other.py").write_text("a = 1\n")
    (library / "data" / "groups.py").write_text("import library.other\n")
    changed = digest(library, kept=tmp_path / "kept")
    assert set(parsed) == {"library.data.groups", "library.other"}
    assert first != changed == digest(library)


def test_what_was_found_for_a_job_is_kept_for_the_next_process(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project({"library": library}, Remembered(tmp_path / "kept"))
    monkeypatch.setattr(digests, "_library", lambda: project)
    digests.job_digest.__wrapped__(JobCode("library.data.stage"))
    assert "library.data.groups" in (tmp_path / "kept").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"library.data.groups False digest": "x"}'])
def test_a_damaged_file_of_kept_digests_is_made_again(library: Path, tmp_path: Path, text: str) -> None:
    kept = tmp_path / "kept"
    kept.write_text(text)
    assert digest(library, kept=kept) == digest(library)
    assert kept.read_text() != text


def test_what_other_code_found_does_not_count(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(library, kept=tmp_path / "kept")
    monkeypatch.setattr(digests, "tree_text", lambda tree: "something else")
    assert digest(library, kept=tmp_path / "kept") == first
    monkeypatch.setattr(digests, "_finders", lambda: b"of other code")
    assert digest(library, kept=tmp_path / "kept") != first


TRAINING, DATA = JobCode("implicit_llm.training.stage"), JobCode("implicit_llm_data.stages.word_problem")
SOURCE = '''"""Doc."""
import math
TAU = 0.8
low, high = 0, 1
limit: int = 3
def solve(x):
    """Doc."""
    return x  # comment
class Solver(Base):
    """Doc."""
    tol = 0.1
    def step(self): return 1
    class Inner:
        def step(self): return 2
'''


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("return x ", "return -x ", "solve"),
        ("return 1", "return 3", "Solver.step"),
        ("return 2", "return 3", "Solver.Inner.step"),
        ("tol = 0.1", "tol = 0.2", "Solver.tol"),
        ("low, high = 0, 1", "low, high = 0, 2", "high, low"),
        ("limit: int = 3", "limit: int = 4", "limit"),
        ("(Base)", "(Other)", "Solver"),
        ("TAU = 0.8", "TAU = 0.9", "TAU"),
        ("def solve", "def solve_all", "solve, solve_all"),
        ("import math", "import math, cmath", "module level"),
    ],
)
def test_a_change_is_named_by_what_it_changes(old: str, new: str, named: str) -> None:
    texts = (SOURCE, SOURCE.replace(old, new))
    records = [CodeRecord("m", {"m": text, "same": ""}, {"m": parts_of(ast.parse(text))}) for text in texts]
    assert changed_files(*records) == [f"m ({named})"]


def test_comments_and_docstrings_are_in_no_part() -> None:
    other = SOURCE.replace("Doc.", "Other.").replace("# comment", "# other")
    assert (parts_of(ast.parse(other)), other == SOURCE) == (parts_of(ast.parse(SOURCE)), False)


def test_new_and_gone_files_are_told() -> None:
    old, new = CodeRecord("m", {"a": "1", "p/x.json": "1"}, {}), CodeRecord("m", {"a": "1", "b": "2"}, {})
    assert changed_files(old, new) == ["b (new)", "p/x.json (gone)"]


def test_the_record_of_a_stage_gives_its_digest_and_comes_back(tmp_path: Path) -> None:
    record_code(tmp_path, [TRAINING, DATA], job_digest)
    for code in (TRAINING, DATA):
        record = read_code_record(tmp_path, job_digest(code))
        assert (record, record.digest) == (code_now(code), job_digest(code))
    assert read_code_record(tmp_path, "0" * 64) is None


def test_a_record_of_other_code_than_its_name_says_is_none(tmp_path: Path) -> None:
    digest = job_digest(DATA)
    record_code(tmp_path, [DATA], job_digest)
    path = record_path(tmp_path, digest)
    other = path.read_text().replace('"files": {', '"files": {"other": "0",')
    for text in (other, "", "[]", "null", "{}"):
        path.write_text(text)
        assert read_code_record(tmp_path, digest) is None


STAGE = JobCode("library.score.stage")


@pytest.fixture
def waiting(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library can be imported, and its stage `score` imports score/extra.py only when it runs."""
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.setattr(digests, "_library", functools.cache(lambda: Project({"library": library})))
    job_digest.cache_clear()
    with mock.patch.dict(sys.modules):
        yield library


def test_unchanged_code_runs_and_what_is_imported_late_is_loaded_before_it_can_change(waiting: Path) -> None:
    require_submitted_code(STAGE.module, job_digest(STAGE), "train/x")
    assert "library.score.extra" in sys.modules


@pytest.mark.parametrize("name", ["stage.py", "extra.py"])
def test_code_that_was_changed_since_its_job_was_planned_is_refused(waiting: Path, name: str) -> None:
    code = job_digest.__wrapped__(STAGE)
    ExperimentFile(waiting / "score" / name).add("another = 1\n")
    with pytest.raises(CodeChanged, match=rf"train/x: the code was changed .* \(digest {code[:12]} then") as caught:
        require_submitted_code(STAGE.module, code, "train/x")
    assert caught.value.exit_code == 2


def test_code_that_changes_between_its_reading_and_its_import_is_refused(waiting: Path) -> None:
    edit = "from pathlib import Path\nPath(__file__).with_name('extra.py').write_text('another = 1')\n"
    ExperimentFile(waiting / "score" / "stage.py").add(edit)
    code = job_digest(STAGE)
    with pytest.raises(CodeChanged):
        require_submitted_code(STAGE.module, code, "train/x")


def test_a_changed_comment_is_no_change_also_in_code_that_cannot_be_loaded_here(waiting: Path) -> None:
    extra = ExperimentFile(waiting / "score" / "extra.py").add("import no_such_package\n")
    code = job_digest.__wrapped__(STAGE)
    extra.add("# a comment\n")
    require_submitted_code(STAGE.module, code, "train/x")
    assert "library.score.extra" not in sys.modules
    assert "library.score.extra" in job_sources(STAGE)
