from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from implicit_llm.kernels.selection import KernelsUnavailable
from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.config.solver import SolverConfigError
from implicit_llm_contracts.runs import launched
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.errors import Preempted, UserError
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import StageRequest, run_stage


class OutOfMemoryError(RuntimeError):
    """Called like the one of torch."""


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job" / "status.json"
    monkeypatch.setenv("SUBMITIT_JOB_STATUS", str(path))
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("no such\nfile"), {"failure_class": "user", "message": "no such file"}),
        (StorageError(28, "the disk is full"), {"failure_class": "quota", "message": "the disk is full"}),
        (Preempted("stopped after step 3"), {"failure_class": "preempted", "message": "stopped after step 3"}),
        (OutOfMemoryError("tried to allocate"), {"failure_class": "oom", "message": "tried to allocate"}),
        (OSError(116, "Stale file handle"), {"failure_class": "quota", "message": "[Errno 116] Stale file handle"}),
        (ZeroDivisionError("by zero"), {"failure_class": "bug", "message": "by zero"}),
        (ModelConfigError("no such field"), {"failure_class": "user", "message": "no such field"}),
        (SolverConfigError("no such mode"), {"failure_class": "user", "message": "no such mode"}),
        (KernelsUnavailable("no triton"), {"failure_class": "env", "message": "no triton"}),
        (SystemExit(143), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_a_stage_says_why_it_fails(
    run_path: Path, identity_text: Callable[..., str], status: Path, error: BaseException, told: dict[str, str] | None
) -> None:
    def fail(context: StageContext) -> StageResult:
        raise error

    with pytest.raises(type(error)):
        run_stage(StageRequest(run_path, identity_text()), fail)
    assert read(status) == told


def test_progress_stays_over_failures_and_a_reason_goes_with_the_next_attempt(
    run_path: Path, identity_text: Callable[..., str], status: Path
) -> None:
    def fail_after_a_step(context: StageContext) -> StageResult:
        launched.report_progress(10)
        raise UserError("broken")

    def look(context: StageContext) -> StageResult:
        assert read(status) == {"progress": 10}
        return StageResult([], {})

    with pytest.raises(UserError):
        run_stage(StageRequest(run_path, identity_text()), fail_after_a_step)
    assert read(status) == {"progress": 10, "failure_class": "user", "message": "broken"}
    run_stage(StageRequest(run_path, identity_text()), look)


def test_the_first_reason_is_the_one(status: Path) -> None:
    launched.report_failure(StorageError(28, "the disk is full"))
    launched.report_failure(RuntimeError("connection closed by peer"))
    assert read(status)["failure_class"] == "quota"


def test_a_file_that_cannot_be_written_or_read_stops_nothing(status: Path) -> None:
    status.parent.mkdir()
    status.write_text("no JSON")
    launched.report_progress(3)
    assert read(status) == {"progress": 3}
    status.unlink()
    status.mkdir()
    launched.report_progress(4)
