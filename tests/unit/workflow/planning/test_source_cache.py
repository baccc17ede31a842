from __future__ import annotations

from pathlib import Path

import pytest

from implicit_llm_workflow.file_digests import Remembered
from implicit_llm_workflow.planning import code_digest as digests
from implicit_llm_workflow.planning import project_sources
from implicit_llm_workflow.planning.code_digest import JobCode, code_digest
from implicit_llm_workflow.planning.project_sources import Project, Source

ENTRY = "library.stage"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stage.py").write_text("from library import solver\n")
    (folder / "solver.py").write_text("tol = 0.1\n")
    return folder


def digest(library: Path, path: Path | None = None) -> str:
    """As a new process computes it, with what an earlier one left at `path`."""
    cache = Remembered(path)
    found = code_digest(ENTRY, Project({"library": library}, cache))
    cache.save()
    return found


def test_an_unchanged_file_is_parsed_once(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(library, tmp_path / "kept")
    assert first == digest(library)
    parsed: list[str] = []
    tree = Source.tree.func
    monkeypatch.setattr(Source, "tree", property(lambda source: parsed.append(source.module) or tree(source)))
    assert digest(library, tmp_path / "kept") == first
    assert parsed == []
    (library / "other.py").write_text("a = 1\n")
    (library / "solver.py").write_text("import library.other\n")
    changed = digest(library, tmp_path / "kept")
    assert changed != first
    assert set(parsed) == {"library.solver", "library.other"}
    assert changed == digest(library)


def test_what_was_found_for_a_job_is_kept_for_the_next_process(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project({"library": library}, Remembered(tmp_path / "kept"))
    monkeypatch.setattr(digests, "_library", lambda: project)
    assert digests.job_digest.__wrapped__(JobCode(ENTRY)) == digest(library)
    assert "library.solver" in (tmp_path / "kept").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"library.solver False digest": "x"}'])
def test_a_damaged_file_is_made_again(library: Path, tmp_path: Path, text: str) -> None:
    kept = tmp_path / "kept"
    kept.write_text(text)
    assert digest(library, kept) == digest(library, kept / "no place") == digest(library)
    assert kept.read_text() != text


def test_what_other_code_found_does_not_count(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(library, tmp_path / "kept")
    monkeypatch.setattr(digests, "tree_text", lambda tree: "something else")
    assert digest(library, tmp_path / "kept") == first
    monkeypatch.setattr(project_sources, "_finders", lambda: b"of other code")
    assert digest(library, tmp_path / "kept") != first
