"""Whatever happens to a process that makes data, the next start ends with the same data, and keeps what was whole."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from tests.fault.forks import DATA, Server
from tests.fault.points import passage, registered, sample
from tests.unit.data.text_samples import shard_config, write_corpus

POINTS = registered(DATA)
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

    def make(self, factory: Factory, run_dir: Path, **env: str) -> int:
        return factory.make(run_dir, self.config, self.upstream, **env)


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
        assert job.make(factory, run_dir, FAULT_TRACE=str(root / "trace")) == 0
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


def check_fault(factory: Factory, job: Job, run_dir: Path, fault: tuple[str, str, int]) -> None:
    point, kind, hit = fault
    assert job.make(factory, run_dir, FAULT=f"{point}:{kind}@{hit}") in EXIT_CODES[kind]
    assert not (run_dir / "manifest.json").exists()
    for record in [path for path in run_dir.glob("work/*/**/*.json") if not path.name.startswith(".")]:
        json.loads(record.read_bytes())  # what has its name is whole
    before = finished_files(run_dir)

    assert job.make(factory, run_dir) == 0
    found = json.loads((run_dir / "manifest.json").read_bytes()) | {"name": job.config["kind"]}
    assert found == json.loads(job.manifest)
    Manifest.read(run_dir / "manifest.json").verify(run_dir, "sha256")
    assert list(run_dir.rglob("*.tmp")) == []
    assert finished_files(run_dir).items() >= before.items(), "a finished shard was made again"


def test_the_jobs_pass_every_fault_point(jobs: list[Job]) -> None:
    assert sorted({point for job in jobs for point in job.hits} & set(POINTS)) == list(POINTS)


@pytest.mark.parametrize(("point", "kind"), sample(POINTS))
def test_a_restart_after_a_fault_ends_as_if_nothing_had_happened(
    factory: Factory, job: Job, tmp_path: Path, point: str, kind: str
) -> None:
    check_fault(factory, job, tmp_path / "a", (point, kind, passage(kind, job.hits[point])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", [*POINTS, "atomic.before_rename", "atomic.mid_write", "publish.before_fsync"])
def test_a_restart_after_a_fault_at_many_passages_ends_as_if_nothing_had_happened(
    factory: Factory, jobs: list[Job], tmp_path: Path, point: str, kind: str
) -> None:
    for number, job in enumerate(jobs):
        num_hits = job.hits[point]  # up to a hundred, as every document is written by itself
        for hit in range(1, num_hits + 1, 1 + num_hits // 10):
            run_dir = tmp_path / f"{number}-{hit}"
            check_fault(factory, job, run_dir, (point, kind, hit))
            shutil.rmtree(run_dir)
