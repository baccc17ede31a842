"""What jobs used of what they asked for: sampled within the job, added up by rule."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import store, usage
from snakemake_executor_plugin_submitit.__main__ import main
from snakemake_executor_plugin_submitit.step import JobStep
from snakemake_executor_plugin_submitit.store import JobFiles
from snakemake_executor_plugin_submitit.usage import amd_gpus, oom_kills

HUNGRY = "held = bytearray(80_000_000); import time\nwhile time.process_time() < 1: pass"


def make_job(folder: Path, name: str, **requested: object) -> JobFiles:
    files = store.job_files(folder, "train", [name])
    made = store.Record("k", "n", 1, "slurm", str(files.submission(1)), rule="train", requested=requested)
    store.save(files, replace(made, state=store.REPORTED, job_id="7", submitted_unix_s=1000.0))
    return files


def add_attempt(files: JobFiles, number: int, seconds: float, exit_code: int = 0, **used: float) -> None:
    store.add_attempt(files.attempts, "start", unix_s=2000.0 * number, waited_s=360.0)
    store.add_attempt(files.attempts, "end", exit_code=exit_code, seconds=seconds, used=used)


def used_by(folder: Path, command: str, gpus: int = 0) -> dict[str, float]:
    files = JobFiles(folder / "job")
    files.path.mkdir()
    JobStep(files, 1, command, str(folder), (), 3600.0, 60.0, 5, gpus=gpus)()
    ((_, end),) = store.read_attempts(files.attempts)
    assert end is not None
    return end["used"]


def test_a_job_measures_its_memory_its_processor_time_and_the_start_of_its_rule(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    # a Snakemake, as far as its command line tells, with a rule that starts after half a second
    (tmp_path / "snakemake").write_text(f"import os, time; time.sleep(0.5); os.system('{sys.executable} hungry.py')")
    used = used_by(tmp_path, f"{sys.executable} ./snakemake; true")
    assert used.keys() == {"mem_mb", "cpu_s", "start_s"}
    assert 0.5 <= used["start_s"] < 3
    assert used["mem_mb"] >= 80
    assert 1 <= used["cpu_s"] < 3


def test_gpus_are_measured_by_the_tool_of_their_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '#!/bin/bash\necho "$@" > asked\nprintf "80, 1000\\n60, 3000\\n[N/A], [N/A]\\n"\n'
    (tmp_path / "nvidia-smi").write_text(lines)
    (tmp_path / "nvidia-smi").chmod(0o755)
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


def test_hours_are_lost_to_waiting_to_the_start_and_to_failures(tmp_path: Path) -> None:
    files = make_job(tmp_path, "a", mem_mb=4000, extra_mem_mb=500, threads=8, gpu=1)
    add_attempt(files, 1, 1800, exit_code=1, start_s=36.0)
    used = {"start_s": 36.0, "mem_mb": 1900, "cpu_s": 7200.0, "gpu_percent": 40.0, "gpu_mem_mb": 9000}
    add_attempt(files, 2, 3600, exit_code=75, **used)
    (use,) = usage.measure(tmp_path)
    assert (use.jobs, use.hours, use.waiting_hours, use.start_hours, use.failure_hours) == (1, 1.5, 0.2, 0.02, 0.5)
    assert use.proposed == {"runtime": 72, "mem_mb": 1800, "threads": 2}
    row = "train  1     1.50   1900 / 4500  2.0 / 8  40 % of 1, 9000 MB  0.20       0.02     0.50"
    assert usage.table([use]).splitlines()[1].startswith(row)
    assert usage.measure(tmp_path, since_unix_s=5000.0) == []
    files.reset()  # as for another try by Snakemake
    add_attempt(files, 1, 3600)
    assert [(use.hours, use.failure_hours) for use in usage.measure(tmp_path)] == [(2.5, 0.5)]


def test_a_request_is_proposed_from_nearly_the_largest_use(tmp_path: Path) -> None:
    for index in range(20):
        add_attempt(make_job(tmp_path, str(index), mem_mb=9000), 1, 600, mem_mb=1000 + index, cpu_s=1.0)
    (use,) = usage.measure(tmp_path)
    assert use.jobs == 20
    assert use.proposed == {"runtime": 12, "mem_mb": 1300}


def test_the_command_shows_the_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_attempt(make_job(tmp_path, "a", mem_mb=1000), 1, 60, mem_mb=100)
    assert main(["efficiency", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["train", "1"]
    main(["efficiency", "--json", "--folder", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)[0]["proposed"]["runtime"] == 2
