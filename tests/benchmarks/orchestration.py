"""Seconds of the driver: the whole paper's dry run, and what Snakemake and the executor plugin add to one job.

    python -m tests.benchmarks.orchestration

A job's overhead is the slope over workflows of few and of many jobs that do nothing, one after another: with
Snakemake's local executor, then with submitit on this machine, where each job starts a Snakemake of its own.
"""

import platform
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.measuring import seconds, show, spread

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
    taken_s = {"dry run of the paper": [dry_run_s() for _ in range(REPEATS)]}
    for name, options in EXECUTORS.items():
        taken_s[f"a job, {name}"] = [job_s(options) for _ in range(REPEATS)]
    rows = [{"what": name, **spread(times, "s"), "goal_s": GOALS_S[name]} for name, times in taken_s.items()]
    show(rows, f"Python {platform.python_version()}, {platform.machine()}; seconds, median of {REPEATS}")


def dry_run_s() -> float:
    return snakemake_s(["paper", "-n", "--quiet", "all"], PROJECT)


def job_s(options: tuple[str, ...]) -> float:
    """Return the time that one more job adds."""
    walls = []
    for count in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
            walls.append(snakemake_s([*options, "--quiet", "all", "--config", f"jobs={count}"], Path(folder)))
    return (walls[1] - walls[0]) / (MANY - FEW)


def snakemake_s(arguments: list[str], folder: Path) -> float:
    command = [sys.executable, "-m", "snakemake", *arguments]
    return seconds(partial(subprocess.run, command, cwd=folder, check=True, capture_output=True))


if __name__ == "__main__":
    main()
