"""Whatever happens to a training process wherever, the next start ends with the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from implicit_llm.runs.manifest import Manifest
from implicit_llm.testing import faults
from implicit_llm.training.checkpoint import read_checkpoint
from tests.unit.training.small_runs import logged, make_data, work_of

ROOT = Path(__file__).parents[2]
POINTS = faults.registered(Path(faults.__file__).parents[1] / "training")
# Every point with a kill and with one of the other kinds; all of them together are among the slow tests.
SAMPLE = [(point, kind) for n, point in enumerate(POINTS) for kind in ("kill9", ("sigterm", "raise", "enospc")[n % 3])]
EXIT_CODES = {"kill9": (-9,), "sigterm": (75, 0), "raise": (1,), "enospc": (0, 1, 2)}


class Server:
    """Runs training phases of training_server.py."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.training_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, run_dir: Path, keep: Sequence[int], **env: str) -> int:
        """Exit code of the phase, or minus the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"run_dir": str(run_dir), "data": str(self._data), "keep": keep, "env": env}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)
        server = Server(make_data(tmp_path_factory.mktemp("data") / "demo"))
    yield server
    server.close()


class Undisturbed:
    """What a phase without faults gives that keeps these steps."""

    def __init__(self, server: Server, tmp_path: Path, keep: Sequence[int]) -> None:
        run_dir, trace = tmp_path / "a" / "only", tmp_path / "trace"
        assert server.run(run_dir, keep, FAULT_TRACE=str(trace)) == 0
        self.keep = keep
        self.manifest = (run_dir / "manifest.json").read_bytes()
        self.points = logged(run_dir)
        self.hits = Counter(trace.read_text().split())


@pytest.fixture(scope="module")
def all_undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Undisturbed]:
    """A phase that keeps its second step; one whose last step is kept too, which is then copied and not moved."""
    return [Undisturbed(server, tmp_path_factory.mktemp("undisturbed"), keep) for keep in ([2], [2, 5])]


@pytest.fixture
def undisturbed(all_undisturbed: list[Undisturbed], point: str) -> Undisturbed:
    """The first phase that passes the point."""
    return next(phase for phase in all_undisturbed if phase.hits[point])


def check_what_is_there(run_dir: Path) -> None:
    """A checkpoint with a final name is whole, also right after a fault; and so is a manifest."""
    for path in run_dir.glob("work/*/manifest.json"):
        Manifest.read(path).verify(run_dir, "sha256")
    below = ("checkpoint", "checkpoints/step-????????", "kept/step-????????")
    for path in [path for pattern in below for path in run_dir.glob(f"work/*/{pattern}")]:
        read_checkpoint(path)


def check_fault(server: Server, undisturbed: Undisturbed, run_dir: Path, fault: tuple[str, str, int]) -> None:
    point, kind, hit = fault
    code = server.run(run_dir, undisturbed.keep, FAULT=f"{point}:{kind}@{hit}")
    assert code in EXIT_CODES[kind]
    check_what_is_there(run_dir)
    before = kept_ones(run_dir)

    assert server.run(run_dir, undisturbed.keep) == 0
    assert (run_dir / "manifest.json").read_bytes() == undisturbed.manifest
    assert logged(run_dir) == undisturbed.points
    assert list(run_dir.rglob("*.tmp")) == []
    assert not (work_of(run_dir) / "checkpoints").exists()
    assert kept_ones(run_dir).items() >= before.items(), "a kept checkpoint was made again"
    assert len(kept_ones(run_dir)) == len(undisturbed.keep)


def kept_ones(run_dir: Path) -> dict[str, int]:
    """Kept checkpoints by name, with what tells a directory from another one of the same name."""
    return {path.name: path.stat().st_ino for path in run_dir.glob("work/*/kept/step-????????")}


def test_the_small_phases_pass_every_fault_point(all_undisturbed: list[Undisturbed]) -> None:
    passed = {point for phase in all_undisturbed for point in phase.hits}
    assert sorted(passed & set(POINTS)) == list(POINTS)


@pytest.mark.parametrize(("point", "kind"), SAMPLE)
def test_a_restart_after_a_fault_ends_as_if_nothing_had_happened(
    server: Server, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    # Each kind strikes at another of the times that the phase passes the point, from the first to the last.
    position = faults.KINDS.index(kind) / (len(faults.KINDS) - 1)
    hit = 1 + round(position * (undisturbed.hits[point] - 1))
    check_fault(server, undisturbed, tmp_path / "a" / "only", (point, kind, hit))


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_restart_after_a_fault_at_any_passage_ends_as_if_nothing_had_happened(
    server: Server, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    for hit in range(1, undisturbed.hits[point] + 1):
        check_fault(server, undisturbed, tmp_path / str(hit) / "a" / "only", (point, kind, hit))
