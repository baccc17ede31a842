"""Whatever changes the disk, the tracker or the handling of a signal stands beside a fault point; pages name its tests.

So new code cannot escape: without a point it fails here, and with one it has to be in one of the matrices.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import test_fault_points, test_training_faults
from tests.fault.forks import CONTRACTS, DATA, JOBS, LIBRARY, ROOT
from tests.fault.points import points_in, registered

ROOTS = (CONTRACTS / "runs", DATA, JOBS, LIBRARY / "training")
CALLS = {
    *(f"os.{name}" for name in ("rename", "replace", "link", "symlink", "write", "truncate", "fsync", "kill")),
    *(f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree")),
    *("np.save", "np.savez", "save_file", "torch.save", "signal.signal", "signals.handle", "signals.restore"),
}
METHODS = {"write_text", "write_bytes", "rename", "replace", "tofile", "save_pretrained", "symlink_to", "hardlink_to"}
TRACKER = ("create_", "log_", "set_", "update_", "delete_")
# Functions that need no point, and why.
WITHOUT = {
    "runs/atomic.py:fsync_file": "also for reading; those who commit by it pass a point right before",
    "runs/faults.py:_inject": "is what a point does",
    "runs/faults.py:point": "writes the names of the points that a test passes",
    "runs/launched.py:die_with": "ends as the death of the parent, which it missed, would have ended it",
    "runs/signals.py:handle": "those who call it set a handler, which has the point",
    "runs/signals.py:restore": "takes the handler away again",
    "runs/signals.py:_leave_to_parent": "in a fork, which goes on without handlers",
    "training/operations/preemption.py:__enter__": "sets the handler, which has the point",
    "training/operations/preemption.py:__exit__": "takes the handler away again",
    "training/operations/watchdog.py:_stop": "what a person may read; the process ends either way",
    "runs/logs.py:show_log": "a link to the log, which no result depends on",
    "implicit_llm_jobs/stage.py:_sigterm_as_exit": "sets the handler, which has the point",
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def own_calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Calls of the function itself, those in lambdas included, without those of functions inside it."""
    inner = {id(node) for other in functions(function) if other is not function for node in ast.walk(other)}
    return (node for node in ast.walk(function) if isinstance(node, ast.Call) and id(node) not in inner)


def is_change(call: ast.Call) -> bool:
    """Whether the call changes something outside of the process, or how it takes a signal."""
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    if name in CALLS:
        return not (call.args and ast.unparse(call.args[0]) == "buffer")  # which is memory
    if method == "open":
        return _opens_for_writing(call, name)
    if method in METHODS and isinstance(call.func, ast.Attribute):
        return not (method == "replace" and (len(call.args) != 1 or name == "dataclasses.replace"))
    return name.startswith("self._client.") and method.startswith(TRACKER)


def _opens_for_writing(call: ast.Call, name: str) -> bool:
    if name == "os.open":
        return "O_CREAT" in ast.unparse(call)
    mode = next((word.value for word in call.keywords if word.arg == "mode"), None)
    position = 1 if name == "open" else 0
    if mode is None and len(call.args) > position:
        mode = call.args[position]
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(set("wax+") & set(mode.value))


def changes_without_a_point(root: Path) -> dict[str, str]:
    """Functions that change something and pass no fault point themselves, with the call that does it."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        for function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            calls = list(own_calls(function))
            changes = [ast.unparse(call) for call in calls if is_change(call)]
            if changes and not any(True for call in calls for _ in points_in(call, str(path))):
                found[f"{path.relative_to(root.parent).as_posix()}:{function.name}"] = changes[0]
    return found


def test_every_change_has_a_fault_point() -> None:
    found = dict(item for root in ROOTS for item in changes_without_a_point(root).items())
    assert {name: call for name, call in found.items() if name not in WITHOUT} == {}
    assert [name for name in WITHOUT if name not in found] == []


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("path.write_text('a')", True),
        ("faults.point('x.y'); path.write_text('a')", False),
        ("open(path, 'r+b')", True),
        ("open(path)", False),
        ("path.open('xb')", True),
        ("os.open(path, os.O_RDWR | os.O_CREAT)", True),
        ("path.replace(other)", True),
        ("text.replace('a', 'b')", False),
        ("retried(lambda: os.rename(a, b))", True),
        ("self._client.log_batch(x)", True),
        ("self._client.get_run(x)", False),
        ("signals.handle(number, handler)", True),
    ],
)
def test_the_search_finds_what_it_should(tmp_path: Path, body: str, is_found: bool) -> None:
    (tmp_path / "new.py").write_text(f"def work(path):\n    {body}\n")
    assert bool(changes_without_a_point(tmp_path)) is is_found


def test_every_fault_point_is_in_a_matrix() -> None:
    covered = {*test_fault_points.DATA_POINTS, *test_fault_points.POINTS, *test_training_faults.POINTS}
    assert sorted(covered) == list(registered(CONTRACTS, DATA, JOBS, LIBRARY))


PAGES = "\n".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/reliability.md", "tests/fault/README.md")
)
REFERENCE = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)?(?:::(test_\w+))?`")


def references() -> Iterator[tuple[str, str | None]]:
    """(file, test or None) of each reference; `::test_x` alone belongs to the file named before it."""
    file = ""
    for found in REFERENCE.finditer(PAGES):
        file = found[1] or file
        if found[1] or found[2]:
            yield file, found[2]


def test_every_test_of_the_page_exists() -> None:
    named = list(references())
    assert len(named) > 50
    for file, test in named:
        paths = [ROOT / file] if "/" in file else list((ROOT / "tests").rglob(file))
        assert len(paths) == 1, file
        assert paths[0].is_file(), file
        assert test is None or f"def {test}(" in paths[0].read_text(encoding="utf-8"), (file, test)


def test_every_row_of_the_page_has_a_test() -> None:
    rows = [line for line in PAGES.splitlines() if re.match(r"\| \d+ ", line)]
    assert [row for row in rows if ".py" not in row.rsplit("|", 2)[1]] == []
    assert len(rows) >= 27
