"""Seconds of the driver: the whole paper's dry run, and what Snakemake and the executor plugin add to one job.

    python tests/benchmarks/orchestration.py

A job's overhead is the slope over workflows of few and of many jobs that do nothing, one after another: with
Snakemake's local executor, then with submitit on this machine, where each job starts a Snakemake of its own.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
REPEATS = 3
FEW, MANY = 2, 10
SNAKEFILE = """\
rule all:
    input: expand("done/{i}", i=range(config["jobs"]))

rule nothing:
    output: touch("done/{i}")
    resources: mem_mb=1000, runtime=5
    shell: "true"
"""
EXECUTORS = {
    "local": ("--cores", "1"),
    "submitit, local": ("--executor", "submitit", "--submitit-cluster", "local", "--jobs", "1"),
}
GOALS_S = {"dry run of the paper": 10.0, "a job, local": 0.1, "a job, submitit, local": 3.0}


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}; seconds, median of {REPEATS}")
    print(f"{'row':26}{'s':>8}{'min':>8}{'max':>8}{'goal':>8}")
    row("dry run of the paper", [dry_run_s() for _ in range(REPEATS)])
    for name, options in EXECUTORS.items():
        row(f"a job, {name}", [job_s(options) for _ in range(REPEATS)])


def dry_run_s() -> float:
    return seconds(["paper", "-n", "--quiet", "all"], PROJECT)


def job_s(options: tuple[str, ...]) -> float:
    """What one more job adds."""
    walls = []
    for count in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
            walls.append(seconds([*options, "--quiet", "all", "--config", f"jobs={count}"], Path(folder)))
    return (walls[1] - walls[0]) / (MANY - FEW)


def seconds(arguments: list[str], folder: Path) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "snakemake", *arguments], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start_s


def row(name: str, taken_s: list[float]) -> None:
    median = statistics.median(taken_s)
    print(f"{name:26}{median:8.2f}{min(taken_s):8.2f}{max(taken_s):8.2f}{GOALS_S[name]:8.1f}")


if __name__ == "__main__":
    main()
