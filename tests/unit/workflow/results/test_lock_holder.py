"""Who holds a lock, seen from outside."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from implicit_llm_workflow.results import job_states
from implicit_llm_workflow.results.job_states import Holder, holder_of
from implicit_llm_workflow.rules.snakemake_driver import DriverRunning, hold_lock
from tests.unit.workflow.run_dirs import DRIVER, JOB, held


@pytest.mark.parametrize(("text", "host"), [(JOB, socket.gethostname()), (DRIVER, None)])
def test_a_holder_is_alive_until_its_process_ends(tmp_path: Path, text: str, host: str | None) -> None:
    with held(tmp_path / "lock", text) as pid:
        assert holder_of(tmp_path / "lock") == Holder(pid, host, True)
    assert holder_of(tmp_path / "lock") == Holder(pid, host, False)


def test_a_process_that_lives_and_has_let_go_holds_nothing_and_looking_takes_no_lock(tmp_path: Path) -> None:
    hold_lock(tmp_path / "lock").close()
    assert holder_of(tmp_path / "lock") == Holder(os.getpid(), None, False)
    with hold_lock(tmp_path / "lock"):
        assert holder_of(tmp_path / "lock") == Holder(os.getpid(), None, True)
        with pytest.raises(DriverRunning, match=f"process {os.getpid()}"):
            hold_lock(tmp_path / "lock")
    hold_lock(tmp_path / "lock").close()


def test_without_a_list_of_locks_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_states, "LOCKS", tmp_path / "none")
    with held(tmp_path / "lock") as pid:
        assert holder_of(tmp_path / "lock") == Holder(pid, socket.gethostname(), True)
    assert holder_of(tmp_path / "lock") == Holder(pid, socket.gethostname(), False)


def test_of_another_machine_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7 on elsewhere\n")
    assert holder_of(tmp_path / "lock") == Holder(7, "elsewhere", None)


@pytest.mark.parametrize("text", [None, "", "unknown", "process on"])
def test_a_file_that_names_nobody_has_no_holder(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "lock").write_text(text)
    assert holder_of(tmp_path / "lock") is None
