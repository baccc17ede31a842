"""Whatever happens wherever, a restart ends with the same result, and nothing half-written ever has a final name."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from implicit_llm.runs.identity import compute_fingerprint
from implicit_llm.runs.manifest import Manifest
from implicit_llm.testing import faults
from implicit_llm.tracking import journal
from implicit_llm.tracking.mlflow_writer import initialise

PACKAGE = Path(faults.__file__).parents[1]
POINTS = tuple(sorted({*faults.registered(PACKAGE / "runs"), *faults.registered(PACKAGE / "tracking")}))
IN_TRACKER = ("tracker.", "mlflow_store.")
PARTS = {"stage": "train", "config": {"seed": 0}, "code": "c0de", "upstream": {}}
IDENTITY = json.dumps({**PARTS, "name": "x", "fingerprint": compute_fingerprint(**PARTS)})  # type: ignore[arg-type]


class Server:
    """Runs the tiny stage of stage_server.py."""

    def __init__(self, store: Path) -> None:
        self.store = store
        command = [sys.executable, str(Path(__file__).with_name("stage_server.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def warm_up(self, run_dir: Path) -> None:
        self._send({"run_dir": str(run_dir), "identity": IDENTITY, "store": str(self.store), "env": {}})

    def run(self, run_dir: Path, **env: str) -> int:
        """Exit code of the stage, or minus the signal that ended it."""
        assert self._process.stdout is not None
        self._send({"run_dir": str(run_dir), "identity": IDENTITY, "env": env})
        return int(self._process.stdout.readline())

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    server = Server(directory / "mlflow.db")  # imports while the store is made here
    initialise(f"sqlite:///{server.store}")
    server.warm_up(directory / "results" / "demo" / "train" / "x")
    yield server
    server.close()


class Undisturbed:
    """What a run without faults gives."""

    def __init__(self, server: Server, tmp_path: Path) -> None:
        run_dir = tmp_path / "results" / "demo" / "train" / "x"
        trace = tmp_path / "trace"
        assert server.run(run_dir, FAULT_TRACE=str(trace)) == 0
        self.manifest = (run_dir / "manifest.json").read_bytes()
        self.tracked = tracked(run_dir)
        self.hits = Counter(trace.read_text().split())


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(server, tmp_path_factory.mktemp("undisturbed"))


def tracked(run_dir: Path) -> list[tuple]:
    """Runs, states and points in the MLflow store, but for measured values and ids."""
    query = (
        "SELECT runs.name, runs.status, key, step, CASE key WHEN 'tokens_per_s' THEN 0 ELSE value END "
        "FROM runs LEFT JOIN metrics USING (run_uuid) ORDER BY key, step"
    )
    with closing(sqlite3.connect(run_dir.parents[2] / "mlflow.db")) as connection:
        return list(connection.execute(query))


def check_final_names(run_dir: Path) -> None:
    """Every file that has its final name is whole, also right after a fault."""
    contents = {"model/weights": "weights", "moved": "moved", "declared/index.html": "page"}
    for work in run_dir.glob("work/*/"):
        for name, content in contents.items():
            assert not (work / name).exists() or (work / name).read_text() == content
        assert not (work / "model").exists() or [path.name for path in (work / "model").iterdir()] == ["weights"]
        assert not (work / "checkpoint").exists() or (work / "checkpoint").read_text() in "1234"
        journal.read(work / "journal.jsonl")
        check_manifest(work / "manifest.json", run_dir)
    check_manifest(run_dir / "manifest.json", run_dir)
    for path in [*run_dir.rglob("mlflow.json"), *run_dir.rglob("provenance.json")]:
        json.loads(path.read_bytes())


def check_manifest(path: Path, run_dir: Path) -> None:
    if path.exists():
        Manifest.read(path).verify(run_dir, "sha256")


def check_fault(server: Server, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str, hit: int) -> None:
    run_dir = tmp_path / "results" / "demo" / "train" / "x"
    trace = tmp_path / "trace"
    if not point.startswith("mlflow_store."):
        (tmp_path / "results").mkdir(parents=True)
        shutil.copyfile(server.store, tmp_path / "results" / "mlflow.db")
    code = server.run(run_dir, FAULT=f"{point}:{kind}@{hit}", FAULT_TRACE=str(trace))
    assert trace.read_text().split().count(point) >= hit, "the fault was never injected"
    if kind in ("kill9", "sigterm"):
        assert code in {"kill9": (-9,), "sigterm": (143, -15, 0)}[kind]
    elif point.startswith(IN_TRACKER):
        assert code == 0, "the tracker stopped the run"
    check_final_names(run_dir)

    assert server.run(run_dir) == 0
    assert (run_dir / "manifest.json").read_bytes() == undisturbed.manifest
    check_final_names(run_dir)
    assert [path for path in tmp_path.rglob("*.tmp") if path.parent.name != "results"] == []
    points = journal.read(next(run_dir.glob("work/*/journal.jsonl")))
    assert [(point.step, point.values["loss"]) for point in points] == [(step, 1 / step) for step in (1, 2, 3, 4)]
    assert tracked(run_dir) == undisturbed.tracked


def test_the_tiny_stage_passes_every_fault_point(undisturbed: Undisturbed) -> None:
    assert sorted(undisturbed.hits) == list(POINTS)


def test_the_tracker_has_every_point_once(undisturbed: Undisturbed) -> None:
    assert {row[:2] for row in undisturbed.tracked} == {("train/x", "FINISHED")}
    keys = [(key, step) for _, _, key, step, _ in undisturbed.tracked]
    assert keys == sorted(
        [(key, step) for key in ("loss", "tokens_per_s") for step in (1, 2, 3, 4)]
        + [("summary.loss", 0), ("summary.steps", 0)]
    )


@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_restart_after_a_fault_ends_as_if_nothing_had_happened(
    server: Server, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    # Each kind strikes at another of the times that the stage passes the point, from the first to the last.
    position = faults.KINDS.index(kind) / (len(faults.KINDS) - 1)
    hit = 1 + round(position * (undisturbed.hits[point] - 1))
    check_fault(server, undisturbed, tmp_path, point, kind, hit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_restart_after_a_fault_at_any_passage_ends_as_if_nothing_had_happened(
    server: Server, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    for hit in range(1, undisturbed.hits[point] + 1):
        check_fault(server, undisturbed, tmp_path / str(hit), point, kind, hit)
