from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from implicit_llm_workflow.rules.snakemake_driver import DriverRunning, hold_lock, report_stale

HOLDER = """
from implicit_llm_workflow.rules.snakemake_driver import *
lock = hold_lock(Path({path!r}))
print("held", flush=True)
input()
"""


def test_the_lock_of_a_killed_driver_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = HOLDER.format(path=str(path))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DriverRunning, match=f"process {other.pid}"):
            hold_lock(path)
        os.kill(other.pid, signal.SIGKILL)
    hold_lock(path).close()


def test_jobs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = hold_lock(tmp_path / "lock")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        with hold_lock(tmp_path / "lock") as again:
            assert not again.closed


def test_many_stale_results_are_summed_up() -> None:
    said: list[str] = []
    report_stale({f"results/x/{number}/manifest.json": "why" for number in range(20)}, "x.yaml", said.append)
    assert said[0] == "stale: results/x/0 (why)"
    assert said[-1] == "stale: 8 more; `implicit-llm status --jobs --config x.yaml` lists them"
