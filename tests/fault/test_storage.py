"""A disk that is full, read-only, or out of order for a while, under a phase that trains."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.conftest import Trainer
from tests.unit.training.small_runs import LLAMA, artifacts, events, logged, saved, train_config

STEPS = 5
CONFIG = train_config(LLAMA, phase={"end_step": STEPS}, total_steps=STEPS)
FILES = 3  # safetensors files of a checkpoint


@pytest.fixture(scope="module")
def undisturbed(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "a" / "only"
    assert trainer.run(run_dir, CONFIG) == 0
    return artifacts(run_dir), logged(run_dir)


def train(trainer: Trainer, run_dir: Path, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit code of the phase, and what it told its executor."""
    status = run_dir.parents[1] / "status.json"
    code = trainer.run(run_dir, CONFIG, SUBMITIT_JOB_STATUS=str(status), **env)
    return code, json.loads(status.read_text()) if status.exists() else {}


def assert_restart_ends_as(undisturbed: tuple, trainer: Trainer, run_dir: Path) -> None:
    assert train(trainer, run_dir) == (0, {"progress": STEPS})
    assert (artifacts(run_dir), logged(run_dir)) == undisturbed


def test_one_save_that_finds_the_disk_full_is_left_out(trainer: Trainer, undisturbed: tuple, run_dir: Path) -> None:
    assert train(trainer, run_dir, IMPLICIT_LLM_FAULT=f"checkpoint.before_file:enospc@{FILES + 2}") == (
        0,
        {"progress": STEPS},
    )
    assert (artifacts(run_dir), logged(run_dir)) == undisturbed
    assert len(events(run_dir, "checkpoint_failed")) == 1
    incidents = json.loads((run_dir / "provenance.json").read_text())["incidents"]
    assert [(incident["name"], incident["step"]) for incident in incidents] == [("checkpoint_failed", 2)]


def test_a_disk_that_stays_full_stops_training_at_the_second_save_with_its_class(
    trainer: Trainer, undisturbed: tuple, run_dir: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    fault = f"checkpoint.before_file:enospc@{FILES + 2}+"
    code, told = train(trainer, run_dir, IMPLICIT_LLM_FAULT=fault, IMPLICIT_LLM_FAULT_TRACE=str(trace))
    assert code == 2
    assert (told["progress"], told["failure_class"]) == (1, "quota")
    assert "bytes needed" in told["message"]
    assert saved(run_dir) == ["step-00000001"]
    assert trace.read_text().split().count("atomic.before_directory") == 3  # one that worked, one left out, one more
    assert_restart_ends_as(undisturbed, trainer, run_dir)


def test_a_journal_that_the_disk_does_not_take_is_not_ahead_of_its_checkpoint(
    trainer: Trainer, undisturbed: tuple, run_dir: Path
) -> None:
    code, told = train(trainer, run_dir, IMPLICIT_LLM_FAULT="journal.before_append:enospc@6+")
    assert (code, told["failure_class"]) == (2, "quota")
    newest = int(saved(run_dir)[-1].removeprefix("step-"))
    assert [step for step, _ in logged(run_dir)] == list(range(1, newest + 1))
    assert_restart_ends_as(undisturbed, trainer, run_dir)


@pytest.mark.parametrize("kind", ["eacces", "eio", "estale"])
def test_an_error_that_passes_costs_no_save(trainer: Trainer, undisturbed: tuple, run_dir: Path, kind: str) -> None:
    faults = (
        f"checkpoint.before_file:{kind}@{FILES + 2},atomic.before_tree_fsync:{kind}@3,journal.before_append:{kind}@7"
    )
    assert train(trainer, run_dir, IMPLICIT_LLM_FAULT=faults) == (0, {"progress": STEPS})
    assert (artifacts(run_dir), logged(run_dir)) == undisturbed
    assert len(events(run_dir, "checkpoint_failed")) == 0
    assert len(events(run_dir, "checkpoint_committed")) == STEPS


def test_an_error_that_stays_is_tried_four_times_at_each_of_two_saves(
    trainer: Trainer, undisturbed: tuple, run_dir: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    code, told = train(
        trainer, run_dir, IMPLICIT_LLM_FAULT="atomic.before_tree_fsync:estale@2+", IMPLICIT_LLM_FAULT_TRACE=str(trace)
    )
    assert (code, told["failure_class"]) == (2, "quota")
    assert trace.read_text().split().count("atomic.before_tree_fsync") == 1 + 4 + 4
    assert saved(run_dir) == ["step-00000001"]
    assert_restart_ends_as(undisturbed, trainer, run_dir)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None or _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)):
        pytest.skip("a file system cannot be mounted here: run as root, or in a container that may")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def _mount(*words: str) -> int:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode


def test_too_little_room_is_refused_before_the_first_step_with_the_numbers(
    trainer: Trainer, undisturbed: tuple, disk: Path
) -> None:
    run_dir = disk / "a" / "only"
    filler = disk / "filler"
    filler.write_bytes(b"\0" * (shutil.disk_usage(disk).free - 100_000))
    code, told = train(trainer, run_dir)
    assert (code, told["failure_class"]) == (2, "quota")
    assert "MiB more and 0.1 MiB are free" in told["message"]
    assert logged(run_dir) == []
    filler.unlink()
    assert_restart_ends_as(undisturbed, trainer, run_dir)


def test_a_disk_that_is_mounted_read_only_keeps_its_checkpoints(
    trainer: Trainer, undisturbed: tuple, disk: Path, tmp_path: Path
) -> None:
    run_dir = disk / "a" / "only"
    assert train(trainer, run_dir, IMPLICIT_LLM_FAULT="train.after_step:kill9@4")[0] == -9
    before = saved(run_dir)
    assert _mount("-o", "remount,ro", str(disk)) == 0
    assert trainer.run(run_dir, CONFIG, SUBMITIT_JOB_STATUS=str(tmp_path / "status.json")) == 2
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["failure_class"] == "quota"
    assert "read-only; mount it writable" in told["message"]
    assert saved(run_dir) == before
    assert _mount("-o", "remount,rw", str(disk)) == 0
    assert_restart_ends_as(undisturbed, trainer, run_dir)
