"""A file system that shows new files late, as NFS does until a directory is listed anew."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from implicit_llm_contracts.runs import atomic
from implicit_llm_contracts.runs.atomic import WAIT, default_wait_s, wait_for_files
from implicit_llm_contracts.runs.manifest import ManifestError
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import StageRequest, run_stage


class LateFileSystem:
    """Hides `names` until a directory has been listed `listings` times; a clock that only waiting moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.listings = 0
        self.now = 0.0
        exists, listdir = os.path.exists, os.listdir

        def late_exists(path: Path) -> bool:
            return (path.name not in self.names or self.listings <= 0) and exists(path)

        def counted_listdir(path: Path) -> list[str]:
            self.listings -= 1
            return listdir(path)

        late_path = SimpleNamespace(**vars(os.path) | {"exists": late_exists})
        patch.setattr(atomic, "os", SimpleNamespace(**vars(os) | {"listdir": counted_listdir, "path": late_path}))
        patch.setattr(atomic, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def late() -> Iterator[LateFileSystem]:
    with pytest.MonkeyPatch.context() as patch:
        yield LateFileSystem(patch)


def test_a_file_that_comes_into_sight_late_is_waited_for(late: LateFileSystem, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    late.names, late.listings = {"a"}, 60
    wait_for_files([tmp_path / "a"], wait_s=60)
    assert late.now == pytest.approx(30)  # 60 listings, half a second apart


def test_a_file_that_never_comes_is_waited_for_until_the_deadline(late: LateFileSystem, tmp_path: Path) -> None:
    wait_for_files([tmp_path / "nowhere" / "a"], wait_s=60)
    assert late.now == pytest.approx(60)


@pytest.mark.parametrize(
    ("env", "wait_s"), [({}, 0), ({"SLURM_JOB_ID": "1"}, 60), ({"SLURM_JOB_ID": "1", WAIT: "5"}, 5)]
)
def test_only_jobs_of_slurm_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], wait_s: float
) -> None:
    for name in ("SLURM_JOB_ID", WAIT):
        monkeypatch.delenv(name, raising=False)
    os.environ |= env
    assert default_wait_s() == wait_s


def write_one(context: StageContext) -> StageResult:
    (context.work / "out.txt").write_text("out")
    return StageResult(["out.txt"], {})


@pytest.mark.parametrize("name", ["manifest.json", "out.txt"])
def test_a_stage_reads_an_input_that_comes_into_sight_late(
    late: LateFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    identity_text: Callable[..., str],
    name: str,
) -> None:
    manifest = run_stage(StageRequest(tmp_path / "d", identity_text("data", "d")), write_one)
    hidden = next(path for path in (tmp_path / "d").rglob(name) if name == "out.txt" or path.parent == tmp_path / "d")
    hidden.rename(tmp_path / "elsewhere")  # so that reading fails as it would
    sleep = late.sleep

    def show(seconds: float) -> None:
        sleep(seconds)
        if late.now >= 30 and not os.path.exists(hidden):
            (tmp_path / "elsewhere").rename(hidden)

    monkeypatch.setattr(atomic.time, "sleep", show)
    request = StageRequest(
        tmp_path / "x", identity_text("train", "x", {"data": manifest.fingerprint}), {"data": tmp_path / "d"}
    )
    with pytest.raises(ManifestError):
        run_stage(request, write_one)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert run_stage(request, write_one) is not None
    assert late.now == pytest.approx(30)
