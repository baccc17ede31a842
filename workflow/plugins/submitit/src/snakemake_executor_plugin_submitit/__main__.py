"""Show the logs and the efficiency of a workflow's jobs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from snakemake_executor_plugin_submitit import store, usage


def main(words: Sequence[str] | None = None) -> int:
    """Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="snakemake-submitit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    logs = commands.add_parser("logs", help="show what a job, or all jobs of a rule, print")
    logs.add_argument(
        "job", metavar="RULE|JOB", help="a rule, a job's id in Slurm, or part of its wildcards or outputs"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="also show what they print from now on")
    use = commands.add_parser("efficiency", help="show for each rule what jobs used and requested")
    use.add_argument("--json", action="store_true", help="all figures, for programs")
    for command in (logs, use):
        command.add_argument("--folder", type=Path, default=store.DEFAULT_FOLDER, help="as --submitit-folder")
    given = parser.parse_args(words)
    if not (given.folder / "jobs").is_dir():
        parser.error(
            f"{given.folder}: no jobs were submitted from here; change to Snakemake's folder, or give --folder"
        )
    if given.command == "logs":
        return show_logs(given.folder, given.job, given.follow)
    rules = usage.measure(given.folder)
    figures = [{**asdict(rule), "proposed": rule.proposed} for rule in rules]
    sys.stdout.write(f"{json.dumps(figures, indent=1) if given.json else usage.table(rules)}\n")
    return 0


def logs_of(folder: Path, job: str) -> list[str]:
    """The log files of the job with that id, else of the rule's jobs, else of jobs whose names contain the word, in the
    order of submission."""
    known = [(found, files) for files, found in store.load_all(folder) if found]
    known.sort(key=lambda pair: pair[0].submitted_unix_s)
    tests = (
        lambda found: job in (found.job_id, found.job_id.partition("_")[0]),
        lambda found: job == found.rule,
        lambda found: job in f"{found.rule}-{found.wildcards} {found.name}",
    )
    for is_wanted in tests:
        chosen = [(found, files) for found, files in known if is_wanted(found)]
        if chosen:
            return [str(path) for found, files in chosen for path in (files.output_log, *found.logs)]
    return []


def show_logs(folder: Path, job: str, is_followed: bool) -> int:
    """Replace this process by `tail`, which names each file if there are several."""
    logs = logs_of(folder, job)
    there = logs if is_followed else [log for log in logs if os.path.exists(log)]
    if not there:
        sys.stderr.write(f"error: no logs of {job} in {folder}; `ls {folder}/jobs` lists all jobs\n")
        return 2
    sys.stdout.flush()
    follow = ["--follow=name", "--retry"] if is_followed else []
    os.execvp("tail", ["tail", "--lines=+1", *follow, "--", *there])  # noqa: S606  the file names need no shell


if __name__ == "__main__":
    sys.exit(main())
