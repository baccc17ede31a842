"""Whatever happens wherever, a restart ends with the same result, and nothing half-written ever has a final name."""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from implicit_llm_contracts.runs import faults, journal
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_jobs.tracking.tracked_run import VARIABLE
from tests.fault.forks import CONTRACTS, DATA, JOBS, Server
from tests.fault.points import passage, registered, sample
from tests.unit.data.text_samples import shard_config, write_corpus

POINTS = registered(CONTRACTS, JOBS)
IN_TRACKER = ("tracker.", "mlflow_store.")
GIVEN = Identity("data", "d", {}, "c0de", {})
TRAIN = Identity("train", "x", {"seed": 0}, "c0de", {"data": GIVEN.fingerprint})
INVOCATION = json.dumps({"id": "0" * 16, "command": "snakemake"})


class Stage:
    """The tiny stage of stage_server.py, and the MLflow store that its runs start from."""

    def __init__(self, directory: Path, store: Path) -> None:
        self.store = store
        first = {**order(directory / "results" / "demo" / "train" / "x"), "store": str(store), "env": {}}
        self.server = Server("tests.fault.stage_server", json.dumps(first))

    def run(self, run_dir: Path, **env: str) -> int:
        """Exit code of the stage, or minus the signal that ended it."""
        return self.server.run(order(run_dir), **{VARIABLE: INVOCATION, **env})


def order(run_dir: Path) -> dict[str, str]:
    """With the data set that the stage reads, which is made if need be."""
    data = run_dir.parents[1] / "data" / "d"
    for path in (data, data / "work" / GIVEN.fingerprint[:16]):
        path.mkdir(parents=True, exist_ok=True)
        Manifest.of(GIVEN, (), {}).write(path / "manifest.json")
    return {"run_dir": str(run_dir), "identity": TRAIN.to_json(), "data": str(data)}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("server"), empty_store)
    yield stage
    stage.server.close()


def damage_the_checkpoint(run_dir: Path) -> None:
    next(run_dir.glob("work/*/checkpoint")).write_text("5")


@dataclass(frozen=True)
class Way:
    """A way through the stage: what happened before (to a finished run), and what comes on top of the fault.

    `store`: of MLflow: there, to be made, or, as importing and writing it takes most of the time, none at all."""

    damage: Callable[[Path], object] | None = None
    fault: str = ""
    store: Literal["there", "new", "none"] = "there"

    def prepare(self, stage: Stage, run_dir: Path) -> None:
        run_dir.parents[2].mkdir(parents=True, exist_ok=True)
        if self.store == "there":
            shutil.copyfile(stage.store, run_dir.parents[2] / "mlflow.db")
        if self.damage is not None:
            assert self.run(stage, run_dir) == 0
            self.damage(run_dir)

    def run(self, stage: Stage, run_dir: Path, **env: str) -> int:
        return stage.run(run_dir, **({"WITHOUT_MLFLOW": "1"} if self.store == "none" else {}), **env)


WAYS = (
    Way(store="none"),
    Way(store="none", damage=damage_the_checkpoint),
    Way(store="none", fault="publish.before_digests:sigterm"),
    Way(),
    Way(damage=damage_the_checkpoint),
    Way(fault="publish.before_digests:sigterm"),
    Way(store="new"),
)


class Undisturbed:
    """What a run without faults gives, and how often each way passes each point."""

    def __init__(self, stage: Stage, tmp_path: Path) -> None:
        run_dir = tmp_path / "results" / "demo" / "train" / "x"
        WAYS[3].prepare(stage, run_dir)
        assert stage.run(run_dir) == 0
        self.manifest = (run_dir / "manifest.json").read_bytes()
        self.tracked = tracked(run_dir)
        self.hits = {way: self._hits(stage, way, tmp_path / str(number)) for number, way in enumerate(WAYS)}

    def _hits(self, stage: Stage, way: Way, tmp_path: Path) -> Counter[str]:
        run_dir, trace = tmp_path / "results" / "demo" / "train" / "x", tmp_path / "trace"
        way.prepare(stage, run_dir)
        assert way.run(stage, run_dir, IMPLICIT_LLM_FAULT=way.fault, IMPLICIT_LLM_FAULT_TRACE=str(trace)) == (
            143 if way.fault else 0
        )
        return Counter(trace.read_text().split())

    def ways_past(self, point: str) -> list[tuple[Way, int]]:
        """The ways that pass the point, and how often each does."""
        return [(way, hits[point]) for way, hits in self.hits.items() if hits[point]]


@pytest.fixture(scope="module")
def undisturbed(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(stage, tmp_path_factory.mktemp("undisturbed"))


def tracked(run_dir: Path) -> list[tuple]:
    """Runs, states and points in the MLflow store, but for measured values and ids."""
    query = (
        "SELECT runs.name, runs.status, key, step, CASE key WHEN 'cost/tokens_per_s' THEN 0 ELSE value END "
        "FROM runs LEFT JOIN metrics USING (run_uuid) ORDER BY key, step"
    )
    with closing(sqlite3.connect(run_dir.parents[2] / "mlflow.db")) as connection:
        return list(connection.execute(query))


def check_final_names(run_dir: Path, is_damaged: bool = False) -> None:
    """Every file that has its final name is whole, also right after a fault."""
    contents = {"model/weights": "weights", "declared/index.html": "page"}
    for work in run_dir.glob("work/*/"):
        for name, content in contents.items():
            assert not (work / name).exists() or (work / name).read_text() == content
        assert sorted(path.name for path in work.glob("model/*")) in ([], ["config.json", "weights"])
        assert not (work / "checkpoint").exists() or (work / "checkpoint").read_text() in "12345"
        journal.read(work / "journal.jsonl")
        check_manifest(work / "manifest.json", run_dir, is_damaged)
    check_manifest(run_dir / "manifest.json", run_dir, is_damaged)
    if (run_dir / "manifest.json").exists() and not is_damaged:
        assert (run_dir / "index.html").read_text() == "page", "published before what it vouches for"
    for path in [*run_dir.rglob("mlflow.json"), *run_dir.rglob("provenance.json")]:
        json.loads(path.read_bytes())


def check_manifest(path: Path, run_dir: Path, is_damaged: bool) -> None:
    if path.exists():
        manifest = Manifest.read(path)
        if not is_damaged:
            manifest.verify(run_dir)


def check_fault(stage: Stage, undisturbed: Undisturbed, way: Way, tmp_path: Path, fault: tuple[str, str, int]) -> None:
    point, kind, hit = fault
    run_dir, trace = tmp_path / "results" / "demo" / "train" / "x", tmp_path / "trace"
    way.prepare(stage, run_dir)
    code = way.run(
        stage, run_dir, IMPLICIT_LLM_FAULT=f"{way.fault},{point}:{kind}@{hit}", IMPLICIT_LLM_FAULT_TRACE=str(trace)
    )
    assert trace.read_text().split().count(point) >= hit, "the fault was never injected"
    if kind in ("kill9", "sigterm"):
        assert code in {"kill9": (-9,), "sigterm": (143, -15, 0)}[kind]
    elif point.startswith(IN_TRACKER):
        assert code == 0, "the tracker stopped the run"
    check_final_names(run_dir, is_damaged=way.damage is not None)

    assert way.run(stage, run_dir) == 0
    assert (run_dir / "manifest.json").read_bytes() == undisturbed.manifest
    check_final_names(run_dir)
    assert [path for path in tmp_path.rglob("*.tmp") if path.parent.name != "results"] == []
    points = journal.read(next(run_dir.glob("work/*/journal.jsonl")))
    assert [(point.step, point.values["loss"]) for point in points] == [(step, 1 / step) for step in (1, 2, 3, 4)]
    if way.store != "none" and tracked(run_dir) != undisturbed.tracked:
        assert way.run(stage, run_dir) == 0  # the tracker of a busy machine has left the rest in the journal
        assert tracked(run_dir) == undisturbed.tracked


def test_the_tiny_stage_passes_every_fault_point(undisturbed: Undisturbed) -> None:
    assert sorted({point for hits in undisturbed.hits.values() for point in hits}) == list(POINTS)


def test_the_tracker_has_every_point_once(undisturbed: Undisturbed) -> None:
    assert {row[:2] for row in undisturbed.tracked} == {("train/x", "FINISHED")}
    keys = [(key, step) for _, _, key, step, _ in undisturbed.tracked]
    assert keys == sorted(
        [(key, step) for key in ("loss", "cost/tokens_per_s") for step in (1, 2, 3, 4)]
        + [("summary/loss", 0), ("summary/steps", 0)]
    )


@pytest.mark.parametrize(("point", "kind"), sample(POINTS))
def test_a_restart_after_a_fault_ends_as_if_nothing_had_happened(
    stage: Stage, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    way, hits = undisturbed.ways_past(point)[0]
    check_fault(stage, undisturbed, way, tmp_path, (point, kind, passage(kind, hits)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_restart_after_a_fault_at_any_passage_ends_as_if_nothing_had_happened(
    stage: Stage, undisturbed: Undisturbed, tmp_path: Path, point: str, kind: str
) -> None:
    way, hits = undisturbed.ways_past(point)[-1]  # with the tracker
    for hit in range(1, hits + 1):
        check_fault(stage, undisturbed, way, tmp_path / str(hit), (point, kind, hit))


DATA_POINTS = registered(DATA)
EXIT_CODES = {"kill9": (-9,), "sigterm": (143,), "raise": (1,), "enospc": (1, 2)}
ROWS = {
    "kind": "word_problem", "group": "S3", "monoid": "none", "hard_fraction": 0.5, "length": 6, "num_samples": 10,
    "split": "train", "seed": 3, "shard_samples": 4,
}  # fmt: skip
SPLIT = {"test_fraction": 0.2, "seed": 1}


@dataclass
class Factory:
    """Runs the stages of data_server.py."""

    server: Server
    downloads: Path

    def make(self, run_dir: Path, config: dict[str, Any], upstream: dict[str, Path], **env: str) -> int:
        """Exit code of the stage, or minus the signal that ended it."""
        fingerprints = {role: Manifest.read(path / "manifest.json").fingerprint for role, path in upstream.items()}
        identity = Identity("data", run_dir.name, config, "c0de", fingerprints).to_json()
        inputs = {role: str(path) for role, path in upstream.items()}
        order = {"run_dir": str(run_dir), "identity": identity, "inputs": inputs, "downloads": str(self.downloads)}
        return self.server.run(order, **env)


@dataclass
class Job:
    """One kind of data: how it is made, and what that gives without faults."""

    config: dict[str, Any]
    upstream: dict[str, Path]
    manifest: bytes = b""
    hits: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Factory]:
    factory = Factory(Server("tests.fault.data_server"), tmp_path_factory.mktemp("downloads"))
    yield factory
    factory.server.close()


@pytest.fixture(scope="module")
def jobs(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """Rows of a word problem, a shard of a corpus, and the stream over its two shards."""
    root = tmp_path_factory.mktemp("made") / "data"
    corpus = write_corpus(factory.downloads)
    trained = {"kind": "tokenizer", "source": "trained", "vocab_size": 300, "corpus": corpus, "max_bytes": 100_000}
    assert factory.make(root / "tokenizer", {**trained, **SPLIT}, {}) == 0
    given = {"tokenizer": root / "tokenizer"}
    shards = {f"shard-{number:05d}": root / f"shard-{number:05d}" for number in range(2)}
    for number, path in enumerate(shards.values()):
        assert factory.make(path, shard_config(corpus, number, 2), given) == 0
    jobs = [
        Job(ROWS, {}),
        Job(shard_config(corpus, 0, 2), given),
        Job({"kind": "token_stream", "split": "test", "length": 16}, shards),
    ]
    for job in jobs:
        run_dir = root / "undisturbed" / job.config["kind"]
        assert factory.make(run_dir, job.config, job.upstream, IMPLICIT_LLM_FAULT_TRACE=str(root / "trace")) == 0
        job.manifest = (run_dir / "manifest.json").read_bytes()
        job.hits = Counter((root / "trace").read_text().split())
        (root / "trace").unlink()
    return jobs


@pytest.fixture
def job(jobs: list[Job], point: str) -> Job:
    """The first job that passes the point."""
    return next(job for job in jobs if job.hits[point])


def finished_files(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Records of finished shards and what lies beside them, each with what tells it from another of the same name."""
    shards = [path for path in run_dir.glob("work/*/shards/*.json") if not path.name.startswith(".")]
    files = [file for record in shards for file in record.parent.glob(f"*{record.stem}.*")]
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def check_data_fault(factory: Factory, job: Job, run_dir: Path, fault: tuple[str, str, int]) -> None:
    point, kind, hit = fault
    make = partial(factory.make, run_dir, job.config, job.upstream)
    assert make(IMPLICIT_LLM_FAULT=f"{point}:{kind}@{hit}") in EXIT_CODES[kind]
    assert not (run_dir / "manifest.json").exists()
    for record in [path for path in run_dir.glob("work/*/**/*.json") if not path.name.startswith(".")]:
        json.loads(record.read_bytes())  # what has its name is whole
    before = finished_files(run_dir)

    assert make() == 0
    found = json.loads((run_dir / "manifest.json").read_bytes()) | {"name": job.config["kind"]}
    assert found == json.loads(job.manifest)
    Manifest.read(run_dir / "manifest.json").verify(run_dir)
    assert list(run_dir.rglob("*.tmp")) == []
    assert finished_files(run_dir).items() >= before.items(), "a finished shard was made again"


def test_the_jobs_pass_every_fault_point(jobs: list[Job]) -> None:
    assert sorted({point for job in jobs for point in job.hits} & set(DATA_POINTS)) == list(DATA_POINTS)


@pytest.mark.parametrize(("point", "kind"), sample(DATA_POINTS))
def test_a_restart_of_a_data_stage_after_a_fault_ends_as_if_nothing_had_happened(
    factory: Factory, job: Job, tmp_path: Path, point: str, kind: str
) -> None:
    check_data_fault(factory, job, tmp_path / "a", (point, kind, passage(kind, job.hits[point])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", [*DATA_POINTS, "atomic.before_rename", "atomic.before_fsync", "publish.before_fsync"])
def test_a_restart_after_a_fault_at_many_passages_ends_as_if_nothing_had_happened(
    factory: Factory, jobs: list[Job], tmp_path: Path, point: str, kind: str
) -> None:
    for number, job in enumerate(jobs):
        num_hits = job.hits[point]  # up to a hundred, as every document is written by itself
        for hit in range(1, num_hits + 1, 1 + num_hits // 10):
            run_dir = tmp_path / f"{number}-{hit}"
            check_data_fault(factory, job, run_dir, (point, kind, hit))
            shutil.rmtree(run_dir)
