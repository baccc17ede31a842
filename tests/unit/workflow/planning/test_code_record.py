"""What changed in the code behind a digest."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from implicit_llm_workflow.planning.code_digest import JobCode, job_digest
from implicit_llm_workflow.planning.code_record import (
    CodeRecord,
    changed_files,
    code_now,
    parts_of,
    read_code_record,
    record_code,
    record_path,
)

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


def changes(old: str, new: str) -> list[str]:
    records = [
        CodeRecord("m", {"m": text, "same": ""}, {"m": parts_of(ast.parse(text))})
        for text in (SOURCE, edited(old, new))
    ]
    return changed_files(*records)


def edited(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


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
    assert changes(old, new) == [f"m ({named})"]


def test_comments_and_docstrings_are_in_no_part() -> None:
    assert parts_of(ast.parse(edited("Doc.", "Other."))) == parts_of(ast.parse(edited("# comment", "# other")))


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
