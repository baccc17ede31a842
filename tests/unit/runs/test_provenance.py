from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from implicit_llm_contracts.runs.places import PROJECT_DIR
from implicit_llm_jobs.provenance import attempts, git_state

START = datetime(2026, 1, 1, tzinfo=UTC)


def _journal(folder: Path, *records: tuple[str, float]) -> Path:
    lines = [
        json.dumps({"kind": "event", "name": name, "time": (START + timedelta(seconds=at)).isoformat(), "host": "h"})
        for name, at in records
    ]
    (folder / "journal.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder / "journal.jsonl"


def test_an_attempt_that_was_cut_off_lasts_to_its_last_record_and_the_last_one_until_now(tmp_path: Path) -> None:
    journal = _journal(tmp_path, ("stage_started", 0), ("checkpoint", 40), ("stage_started", 100), ("checkpoint", 110))
    found = attempts(journal, START + timedelta(seconds=130))
    assert [(attempt["started"], attempt["busy_s"]) for attempt in found] == [
        ("2026-01-01T00:00:00+00:00", 40.0),
        ("2026-01-01T00:01:40+00:00", 30.0),
    ]


def test_a_job_that_tells_nothing_but_its_start_has_taken_time(tmp_path: Path) -> None:
    (attempt,) = attempts(_journal(tmp_path, ("stage_started", 0)), START + timedelta(seconds=2.5))
    assert attempt["busy_s"] == 2.5


def test_the_commit_is_that_of_the_checkout_which_the_code_comes_from() -> None:
    asked = ["git", "-C", str(PROJECT_DIR), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    found = git_state()
    assert found["commit"] == commit
    assert isinstance(found["is_dirty"], bool)
