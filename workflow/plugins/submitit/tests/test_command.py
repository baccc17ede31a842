"""Finding the logs of a job in one command, and deleting those that nobody needs."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.__main__ import logs_of
from snakemake_executor_plugin_submitit.store import JobFiles, write_json


def make_job(
    root: Path, rule: str, wildcards: str, job_id: str, kind: str | None = None, **changes: object
) -> JobFiles:
    files = store.job_files(root, rule, [rule, wildcards])
    made = store.Record("k", f"{rule}-{wildcards}", 1, "slurm", str(files.submission(1)))
    store.save(files, replace(made, rule=rule, wildcards=wildcards, job_id=job_id, state=store.REPORTED, **changes))
    files.submission(1).mkdir(exist_ok=True)
    files.output_log.write_text(f"output of {job_id}\n")
    files.attempts.touch()
    write_json(files.outcome(1), {"failure_class": kind})
    return files


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "snakemake_executor_plugin_submitit"]
    return subprocess.run([*program, *words, "--folder", str(folder)], capture_output=True, text=True, check=False)


def test_logs_are_found_by_rule_by_id_and_by_wildcards(tmp_path: Path) -> None:
    jobs = {
        "12": make_job(tmp_path, "train", "s4-s0", "12", logs=("/logs/train-0",)),
        "13_1": make_job(tmp_path, "train", "s4-s1", "13_1", submitted_unix_s=time.time() + 1),
        "14": make_job(tmp_path, "evaluate", "s4-s0", "14"),
    }
    logs = {job_id: str(files.output_log) for job_id, files in jobs.items()}
    assert logs_of(tmp_path, "train") == [logs["12"], "/logs/train-0", logs["13_1"]]
    assert logs_of(tmp_path, "13_1") == logs_of(tmp_path, "13") == [logs["13_1"]]
    assert logs_of(tmp_path, "evaluate-s4") == [logs["14"]]


def test_the_command_prints_the_logs_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    make_job(tmp_path, "train", "a", "12")
    assert command(tmp_path, "logs", "train").stdout == "output of 12\n"
    refused = command(tmp_path, "logs", "moon")
    assert refused.returncode == 2
    assert "no logs of moon" in refused.stderr


def keep_open(files: JobFiles) -> None:
    known = store.load(files)
    assert known is not None
    store.save(files, replace(known, state=store.SUBMITTED))


def test_of_a_successful_job_the_logs_go_and_the_figures_stay(tmp_path: Path) -> None:
    done, failed = make_job(tmp_path, "a", "", "1"), make_job(tmp_path, "b", "", "2", "bug")
    running = make_job(tmp_path, "c", "", "3")
    keep_open(running)
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert [files.output_log.exists() for files in (done, failed, running)] == [False, True, True]
    assert not done.submission(1).exists()
    assert store.load(done) is not None
    assert done.attempts.exists()


def test_what_is_old_goes_as_a_whole_unless_it_may_still_run(tmp_path: Path) -> None:
    old = make_job(tmp_path, "a", "", "1", "bug", submitted_unix_s=0.0)
    running = make_job(tmp_path, "b", "", "2", submitted_unix_s=0.0)
    young = make_job(tmp_path, "c", "", "3")
    keep_open(running)
    for path in (path for files in (old, running) for path in (files.output_log, files.attempts)):
        os.utime(path, (time.time() - 86400 * 40,) * 2)
    store.clean(tmp_path, is_success_deleted=False, days=30)
    assert [files.path.exists() for files in (old, running, young)] == [False, True, True]


def test_the_files_of_an_array_go_with_the_last_of_its_jobs(tmp_path: Path) -> None:
    array = tmp_path / "arrays" / "x"
    array.mkdir(parents=True)
    os.utime(array, (time.time() - 3600,) * 2)
    make_job(tmp_path, "a", "1", "1_0", folder=str(array))
    make_job(tmp_path, "a", "2", "1_1", "bug", folder=str(array))
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert array.exists()
    make_job(tmp_path, "a", "2", "1_1", folder=str(array))
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert not array.exists()
