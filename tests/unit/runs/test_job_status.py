"""What a job tells of itself: why it fails, how far it is, and what it ran on."""

import io
import json
import logging
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs import launched
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.logs import wants_bar
from implicit_llm_contracts.runs.places import PROJECT_DIR
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.progress import Progress
from implicit_llm_jobs.provenance import attempts, git_state
from implicit_llm_jobs.stage import StageRequest, run_stage


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job" / "status.json"
    monkeypatch.setenv("SUBMITIT_JOB_STATUS", str(path))
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_shown_on_a_terminal_and_ends_with_one_line_of_the_final_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    monkeypatch.setattr("implicit_llm_jobs.progress.PROGRESS_EVERY_S", -1.0)
    with caplog.at_level(logging.INFO):
        progress = Progress("data mode", 4)
        for done in (1, 3, 4):
            progress.tell(done, lambda: "loss 2.5")
    assert "data mode" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
    assert [getattr(record, "file_only", False) for record in caplog.records] == [True, True, False]
    assert caplog.records[-1].message == "data mode: 4/4 samples, loss 2.5"


def test_without_a_terminal_there_are_lines_and_no_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        progress = Progress("data mode", 2)
        progress.tell(1, lambda: "not due")
        progress.tell(2, lambda: "loss 2.5")
    assert capsys.readouterr().err == ""
    assert [record.message for record in caplog.records] == ["data mode: 2/2 samples, loss 2.5"]


@pytest.mark.parametrize(
    ("stderr", "env", "progress", "expected"),
    [
        (Terminal(), {}, "auto", True),
        (Terminal(), {"SNAKEMAKE_PROFILE": "profiles/local"}, "auto", False),
        (Terminal(), {"SNAKEMAKE_PROFILE": "profiles/local"}, "bar", True),
        (io.StringIO(), {}, "auto", False),
    ],
)
def test_a_bar_is_for_terminals_outside_of_snakemake(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, env: dict[str, str], progress: str, expected: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    os.environ |= env  # the variables are put back after each test
    assert wants_bar(progress) is expected


START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("records", "now_s", "busy"),
    [
        # An attempt that was cut off lasts to its last record, and the last one until now.
        (
            [("stage_started", 0), ("checkpoint", 40), ("stage_started", 100), ("checkpoint", 110)],
            130,
            {0: 40, 100: 30},
        ),
        ([("stage_started", 0)], 2.5, {0: 2.5}),
    ],
)
def test_the_seconds_of_each_attempt_are_read_from_its_journal(
    tmp_path: Path, records: list[tuple[str, float]], now_s: float, busy: dict[float, float]
) -> None:
    times = {at: (START + timedelta(seconds=at)).isoformat() for _, at in records}
    lines = [json.dumps({"kind": "event", "name": name, "time": times[at], "host": "h"}) + "\n" for name, at in records]
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    found = attempts(tmp_path / "journal.jsonl", START + timedelta(seconds=now_s))
    assert {attempt["started"]: attempt["busy_s"] for attempt in found} == {times[at]: s for at, s in busy.items()}


def test_the_commit_is_that_of_the_checkout_which_the_code_comes_from() -> None:
    asked = ["git", "-C", str(PROJECT_DIR), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    found = git_state()
    assert found["commit"] == commit
    assert isinstance(found["is_dirty"], bool)
