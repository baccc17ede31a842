"""What the command of the plugin shows: logs, and what jobs used of what they asked for; and which logs are deleted."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import store, usage
from snakemake_executor_plugin_submitit.__main__ import logs_of, main
from snakemake_executor_plugin_submitit.step import JobStep
from snakemake_executor_plugin_submitit.store import JobFiles, write_json
from snakemake_executor_plugin_submitit.usage import amd_gpus, oom_kills
from toy_project import write_program


def make_job(root: Path, rule: str = "train", wildcards: str = "", kind: str | None = None, **about: Any) -> JobFiles:
    """The files of a job that has ended, and been reported, as its class of failure says."""
    files = store.job_files(root, rule, [rule, wildcards])
    made = store.Record("k", f"{rule}-{wildcards}", 1, "slurm", str(files.submission(1)), is_open=False, job_id="7")
    store.save(files, replace(made, rule=rule, wildcards=wildcards, **about))
    files.submission(1).mkdir(exist_ok=True)
    files.output_log.write_text(f"output of {wildcards}\n")
    files.attempts.touch()
    write_json(files.outcome(1), {"failure_class": kind, "exit_code": int(kind is not None)})
    return files


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "snakemake_executor_plugin_submitit"]
    return subprocess.run([*program, *words, "--folder", str(folder)], capture_output=True, text=True, check=False)


def test_logs_are_found_by_rule_by_id_and_by_wildcards(tmp_path: Path) -> None:
    jobs = {
        "12": make_job(tmp_path, "train", "s4-s0", job_id="12", logs=("/logs/train-0",)),
        "13_1": make_job(tmp_path, "train", "s4-s1", job_id="13_1", submitted_unix_s=time.time() + 1),
        "14": make_job(tmp_path, "evaluate", "s4-s0", job_id="14"),
    }
    logs = {job_id: str(files.output_log) for job_id, files in jobs.items()}
    assert logs_of(tmp_path, "train") == [logs["12"], "/logs/train-0", logs["13_1"]]
    assert logs_of(tmp_path, "13_1") == logs_of(tmp_path, "13") == [logs["13_1"]]
    assert logs_of(tmp_path, "evaluate-s4") == [logs["14"]]


def test_the_command_prints_the_logs_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    make_job(tmp_path, "train", "a")
    assert command(tmp_path, "logs", "train").stdout == "output of a\n"
    refused = command(tmp_path, "logs", "moon")
    assert refused.returncode == 2
    assert "no logs of moon" in refused.stderr


def test_of_a_successful_job_the_logs_go_and_the_figures_stay(tmp_path: Path) -> None:
    done, failed = make_job(tmp_path, "a"), make_job(tmp_path, "b", kind="bug")
    running = make_job(tmp_path, "c", is_open=True)
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert [files.output_log.exists() for files in (done, failed, running)] == [False, True, True]
    assert not done.submission(1).exists()
    assert store.load(done) is not None
    assert done.attempts.exists()


def test_what_is_old_goes_as_a_whole_unless_it_may_still_run(tmp_path: Path) -> None:
    old = make_job(tmp_path, "a", kind="bug", submitted_unix_s=0.0)
    running = make_job(tmp_path, "b", submitted_unix_s=0.0, is_open=True)
    young = make_job(tmp_path, "c")
    for path in (path for files in (old, running) for path in (files.output_log, files.attempts)):
        os.utime(path, (time.time() - 86400 * 40,) * 2)
    store.clean(tmp_path, is_success_deleted=False, days=30)
    assert [files.path.exists() for files in (old, running, young)] == [False, True, True]


def test_the_files_of_an_array_go_with_the_last_of_its_jobs(tmp_path: Path) -> None:
    array = tmp_path / "arrays" / "x"
    array.mkdir(parents=True)
    os.utime(array, (time.time() - 3600,) * 2)
    make_job(tmp_path, "a", "1", job_id="1_0", folder=str(array))
    make_job(tmp_path, "a", "2", "bug", job_id="1_1", folder=str(array))
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert array.exists()
    make_job(tmp_path, "a", "2", job_id="1_1", folder=str(array))
    store.clean(tmp_path, is_success_deleted=True, days=0)
    assert not array.exists()


HUNGRY = "held = bytearray(80_000_000); import time\nwhile time.process_time() < 1: pass"


def add_attempt(files: JobFiles, number: int, seconds: float, exit_code: int = 0, **used: float) -> None:
    store.add_attempt(files.attempts, "start", unix_s=2000.0 * number, waited_s=360.0)
    store.add_attempt(files.attempts, "end", exit_code=exit_code, seconds=seconds, used=used)


def used_by(folder: Path, command: str, gpus: int = 0) -> dict[str, float]:
    files = JobFiles(folder / "job")
    files.path.mkdir()
    record = store.Record("k", "n", 1, "slurm", str(files.submission(1)), requested={"runtime": 60, "gpu": gpus})
    JobStep(files, record, command, str(folder), 60.0, 5)()
    (attempt,) = store.read_attempts(files.attempts)
    return attempt["used"]


def test_a_job_measures_its_memory_and_its_processor_time(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    used = used_by(tmp_path, f"{sys.executable} hungry.py; true")
    assert used.keys() == {"mem_mb", "cpu_s"}
    assert used["mem_mb"] >= 80
    assert 1 <= used["cpu_s"] < 3


def test_gpus_are_measured_by_the_tool_of_their_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = 'printf "80, 1000\\n60, 3000\\n[N/A], [N/A]\\n"'
    write_program(tmp_path, "nvidia-smi", 'echo "$@" > asked', answer)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.chdir(tmp_path)
    used = used_by(tmp_path, "sleep 0.5", gpus=2)
    assert (used["gpu_percent"], used["gpu_mem_mb"]) == (70.0, 3000)
    assert "--id=2,3" in (tmp_path / "asked").read_text()


def test_gpus_of_amd_are_read_from_the_kernel(tmp_path: Path) -> None:
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "gpu_busy_percent").write_text("90\n")
    (device / "mem_info_vram_used").write_text(f"{2**30}\n")
    assert amd_gpus(tmp_path) == [(90.0, 1024.0)]


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


def test_hours_are_lost_to_waiting_and_to_failures(tmp_path: Path) -> None:
    files = make_job(
        tmp_path, requested={"mem_mb": 4000, "extra_mem_mb": 500, "threads": 8, "gpu": 1}, submitted_unix_s=1000.0
    )
    add_attempt(files, 1, 1800, exit_code=1)
    used = {"mem_mb": 1900, "cpu_s": 7200.0, "gpu_percent": 40.0, "gpu_mem_mb": 9000}
    add_attempt(files, 2, 3600, exit_code=75, **used)
    (use,) = usage.measure(tmp_path)
    assert (use.jobs, use.hours, use.waiting_hours, use.failure_hours) == (1, 1.5, 0.2, 0.5)
    assert use.proposed == {"runtime": 72, "mem_mb": 1800, "threads": 2}
    row = "train  1     1.50   1900 / 4500  2.0 / 8  40 % of 1, 9000 MB  0.20       0.50"
    assert usage.table([use]).splitlines()[1].startswith(row)
    assert usage.measure(tmp_path, since_unix_s=5000.0) == []
    files.reset()  # as for another try by Snakemake
    add_attempt(files, 1, 3600)
    assert [(use.hours, use.failure_hours) for use in usage.measure(tmp_path)] == [(2.5, 0.5)]


def test_a_request_is_proposed_from_nearly_the_largest_use(tmp_path: Path) -> None:
    for index in range(20):
        files = make_job(tmp_path, wildcards=str(index), requested={"mem_mb": 9000})
        add_attempt(files, 1, 600, mem_mb=1000 + index, cpu_s=1.0)
    (use,) = usage.measure(tmp_path)
    assert use.jobs == 20
    assert use.proposed == {"runtime": 12, "mem_mb": 1300}


def test_the_command_shows_the_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_attempt(make_job(tmp_path, requested={"mem_mb": 1000}), 1, 60, mem_mb=100)
    assert main(["efficiency", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["train", "1"]
    main(["efficiency", "--json", "--folder", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)[0]["proposed"]["runtime"] == 2
