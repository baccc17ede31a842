"""The code is compared with the identity when a job begins.

tests/workflow/test_orchestration_faults.py has the same with Snakemake.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from implicit_llm_workflow.planning import code_digest
from implicit_llm_workflow.planning.code_digest import CodeChanged, JobCode, job_digest, require_submitted_code
from implicit_llm_workflow.planning.project_sources import Project

SOURCES = {
    "__init__.py": "",
    "stage.py": "def run():\n    from waiting_library.late import value\n    return value\n",
    "late.py": "value = 1\n",
    "broken.py": "import no_such_package\n",
}
STAGE = "waiting_library.stage"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose stage imports one of its modules only when it runs."""
    folder = tmp_path / "waiting_library"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(code_digest, "_library", lambda: Project({"waiting_library": folder}))
    job_digest.cache_clear()
    yield folder
    job_digest.cache_clear()
    for name in ("waiting_library", STAGE, "waiting_library.late"):
        sys.modules.pop(name, None)


def digest() -> str:
    """As the driver found it when it planned the job."""
    found = job_digest(JobCode(STAGE))
    job_digest.cache_clear()
    return found


def test_unchanged_code_runs_and_what_is_imported_late_is_loaded_before_it_can_change(library: Path) -> None:
    require_submitted_code(STAGE, digest(), "train/x")
    (library / "late.py").write_text("value = 2\n")
    assert sys.modules[STAGE].run() == 1


@pytest.mark.parametrize("name", ["stage.py", "late.py"])
def test_code_that_was_changed_meanwhile_is_refused(library: Path, name: str) -> None:
    code = digest()
    with open(library / name, "a") as file:
        file.write("another = 1\n")
    with pytest.raises(CodeChanged, match=rf"train/x: the code was changed .* \(digest {code[:12]} then") as caught:
        require_submitted_code(STAGE, code, "train/x")
    assert caught.value.exit_code == 2


def test_a_changed_comment_is_no_change_also_in_code_that_cannot_be_loaded_here(library: Path) -> None:
    (library / "late.py").write_text("def load():\n    from waiting_library import broken\n")
    code = digest()
    with open(library / "late.py", "a") as file:
        file.write("# a comment\n")
    require_submitted_code(STAGE, code, "train/x")
    assert "waiting_library.broken" not in sys.modules
    assert "waiting_library.broken" in code_digest.job_sources(JobCode(STAGE))
