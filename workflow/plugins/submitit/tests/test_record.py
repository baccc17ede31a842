"""Which logs and records are deleted, and how a kill for want of memory is noticed."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.processes import oom_kills
from snakemake_executor_plugin_submitit.store import JobFiles


def make_job(root: Path, rule: str = "train", wildcards: str = "", **about: Any) -> JobFiles:
    """The files of a job that has ended, and been reported."""
    files = store.job_files(root, rule, [rule, wildcards])
    made = store.Record("k", f"{rule}-{wildcards}", 1, "slurm", str(files.submission(1)), is_open=False, job_id="7")
    store.save(files, replace(made, rule=rule, wildcards=wildcards, **about))
    files.submission(1).mkdir(exist_ok=True)
    files.output_log.write_text(f"output of {wildcards}\n")
    files.attempts.touch()
    return files


def test_what_is_old_goes_as_a_whole_unless_it_may_still_run(tmp_path: Path) -> None:
    old = make_job(tmp_path, "a", submitted_unix_s=0.0)
    running = make_job(tmp_path, "b", submitted_unix_s=0.0, is_open=True)
    young = make_job(tmp_path, "c")
    for path in (path for files in (old, running) for path in (files.output_log, files.attempts)):
        os.utime(path, (time.time() - 86400 * 40,) * 2)
    store.clean(tmp_path, days=30)
    assert [files.path.exists() for files in (old, running, young)] == [False, True, True]


def test_the_files_of_an_array_go_with_the_last_of_its_jobs(tmp_path: Path) -> None:
    array = tmp_path / "arrays" / "x"
    array.mkdir(parents=True)
    os.utime(array, (time.time() - 3600,) * 2)
    for task in ("1", "2"):
        make_job(tmp_path, "a", task, job_id=f"1_{task}", folder=str(array))
    store.clean(tmp_path, days=30)
    assert array.exists()
    shutil.rmtree(tmp_path / "jobs")
    store.clean(tmp_path, days=30)
    assert not array.exists()


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/job_7\n", "job_7/memory.events"), ("4:cpu,memory:/job_7\n0::/\n", "memory/job_7/memory.oom_control")],
)
def test_kills_for_want_of_memory_are_those_of_the_jobs_control_group(tmp_path: Path, groups: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(groups)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("max 3\noom_kill 2\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 2
