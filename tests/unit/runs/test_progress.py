from __future__ import annotations

import io
import logging

import pytest

from implicit_llm_contracts.runs.logs import wants_bar
from implicit_llm_jobs.progress import Progress


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
    for_the_file_only = [getattr(record, "file_only", False) for record in caplog.records]
    assert for_the_file_only == [True, True, False]
    assert caplog.records[-1].message == "data mode: 4/4 samples, loss 2.5"


def test_without_a_terminal_there_are_lines_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with caplog.at_level(logging.INFO):
        progress = Progress("data mode", 2)
        progress.tell(1, lambda: "not due")
        progress.tell(2, lambda: "loss 2.5")
    assert stderr.getvalue() == ""
    assert [record.message for record in caplog.records] == ["data mode: 2/2 samples, loss 2.5"]


def test_a_bar_is_for_terminals_outside_of_snakemake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    assert wants_bar("auto")
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "profiles/local")
    assert not wants_bar("auto")
    assert wants_bar("bar")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.delenv("SNAKEMAKE_PROFILE")
    assert not wants_bar("auto")
