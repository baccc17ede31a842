"""Every byte that a manifest vouches for, in data made by the real stage."""

import json
import shutil
from pathlib import Path

import pytest

from implicit_llm_workflow import console
from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.verify import with_shards
from tests.unit.workflow.console_calls import output
from tests.unit.workflow.experiments import TINY, ExperimentFile
from tests.unit.workflow.run_dirs import real_plan

JOB, OTHER = "data/s3-train", "data/s3-test-L8-h0.5"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two data sets as their jobs leave them, one of them in four shards."""
    path = tmp_path_factory.mktemp("made") / "tiny.yaml"
    path.write_text(TINY.replace("group: S3", "group: S3\n    shard_samples: 16"))
    plan = real_plan(ExperimentFile(path))
    for key in (JOB, OTHER):
        with pytest.raises(SystemExit) as stopped:
            console.main(["job", "--run-dir", str(plan.root / key), "--identity", plan.identities[key].to_json()])
        assert not stopped.value.code
    return path.parent


@pytest.fixture
def made(template: Path, tmp_path: Path) -> Plan:
    """The plan of a copy."""
    shutil.copytree(template, tmp_path / "copy")
    return real_plan(ExperimentFile(tmp_path / "copy" / "tiny.yaml"))


def verify(plan: Plan, capsys: pytest.CaptureFixture[str], *targets: str, code: int = 1) -> str:
    where = ("--config", str(plan.experiment.source), "--results", str(plan.root.parent))
    return output(capsys, "verify", *targets, *where, code=code)


def shards(plan: Plan) -> list[Path]:
    return sorted((plan.root / JOB).glob("work/*/shards/*.npy"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_whole_results_pass_and_unfinished_jobs_are_counted(made: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    said = "not made yet: 10 of 12 jobs\n2 jobs, 14 files, 0.0 MiB: none broken\n"  # 6 shards, 2 indices
    assert verify(made, capsys, code=0) == said


def test_a_missing_a_cut_and_a_changed_file_are_told_apart_with_their_job(
    made: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, cut, flipped = shards(made)[:3]
    missing.unlink()
    flip(flipped, -1)
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-1])
    out = verify(made, capsys)
    assert f"broken {missing}: expected {size} bytes, found no file" in out
    assert f"broken {cut}: expected {size} bytes, found {size - 1} (job {JOB})" in out
    assert f"broken {flipped}: expected sha256" in out
    assert "3 broken" in out


def test_only_the_targets_are_read(made: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    flip(shards(made)[0], -1)
    verify(made, capsys, OTHER, code=0)
    verify(made, capsys, str(made.root / JOB))
    assert "not made yet: 1 of 1 jobs" in verify(made, capsys, "train/explicit-s0/explicit", code=0)


@pytest.mark.parametrize("damage", ["{", '{"stage": "data"}', None])
def test_a_damaged_manifest_is_broken_itself(
    made: Plan, capsys: pytest.CaptureFixture[str], damage: str | None
) -> None:
    path = made.root / JOB / "manifest.json"
    path.write_text(damage or path.read_text().replace('"seed": 0', '"seed": 1'))
    out = verify(made, capsys)
    assert f"broken {path}:" in out
    assert f"rm -f {path}" in out


def test_a_manifest_that_points_out_of_its_directory_is_refused(made: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.root / JOB / "manifest.json"
    values = json.loads(path.read_text())
    values["files"][0]["path"] = "../../secret"
    for copy in (path, *(made.root / JOB).glob("work/*/manifest.json")):
        copy.write_text(json.dumps(values))
    assert "leads out of the run directory" in verify(made, capsys)


def test_a_changed_copy_of_a_declared_file_is_found(made: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.root / JOB / "manifest.json"
    work = next((made.root / JOB).glob("work/[0-9a-f]*"))
    page = work / "declared" / "page.html"
    page.parent.mkdir()
    page.write_text("page")
    values = json.loads(path.read_text())
    sha256 = "3660315a9af3df255d8f19ab077e4797822b41488a0e2a04bc6af71213c23274"
    values["files"].append({"path": page.relative_to(made.root / JOB).as_posix(), "size": 4, "sha256": sha256})
    for copy in (path, work / "manifest.json"):
        copy.write_text(json.dumps(values))
    (made.root / JOB / "page.html").write_text("pale")
    assert f"broken {made.root / JOB}/page.html: expected sha256" in verify(made, capsys)


def test_a_stream_of_tokens_is_verified_with_its_shards(tmp_path: Path) -> None:
    plan = make_plan("miniature", tmp_path)
    keys = [node.key for node in with_shards(plan, ["data/text-train", "data/babi-train"])]
    assert keys == ["data/text-shard-00000", "data/text-shard-00001", "data/text-train", "data/babi-train"]
