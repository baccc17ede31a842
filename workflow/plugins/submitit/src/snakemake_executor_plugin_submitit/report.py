"""What is said of a job that failed, and whether it is worth another submission."""

from __future__ import annotations

import re
import subprocess

from snakemake_executor_plugin_submitit import attempts, failure
from snakemake_executor_plugin_submitit.failure import Failure
from snakemake_executor_plugin_submitit.job_files import last_lines, read_json
from snakemake_executor_plugin_submitit.monitor import Tracked, stderr_path
from snakemake_executor_plugin_submitit.step import UNFRUITFUL_LIMIT, JobStep, environment, script


def is_worth_another(job: Tracked, why: Failure, requeue_limit: int) -> bool:
    """The one retry rule of each class. A job that asks for it goes on until it makes no progress."""
    limit = failure.RETRIES.get(why.kind, 0)
    if limit is not None:
        return job.record.retries.get(why.kind, 0) < limit
    progress = read_json(job.files.status).get("progress")
    return (
        len(attempts.starts(job.files.attempts)) <= requeue_limit
        and attempts.unfruitful(job.files.attempts, progress) < UNFRUITFUL_LIMIT
    )


def message(job: Tracked, why: Failure) -> str:
    """All that helps to find the cause: class, states, codes, logs, last lines."""
    state = why.state or (job.slurm.state if job.slurm else "")
    facts = [f"class {why.kind}"]
    if job.record.cluster == "slurm":
        facts.append(f"Slurm state {state or 'not known'}")
    if why.exit_code is not None:
        facts.append(f"exit code {why.exit_code}")
    if why.nodes:
        facts.append(f"on {why.nodes}")
    lines = [f"job {job.record.job_id} failed: {', '.join(facts)}{': ' + why.message if why.message else ''}"]
    lines.append(f"next: {failure.NEXT.get(why.kind, 'see the log')}")
    lines.append(f"output: {job.files.output_log}")
    lines.append(f"submitit: {stderr_path(job)}")
    tail = last_lines(job.files.output_log) or last_lines(stderr_path(job))
    if tail:
        lines += ["last lines:", *(f"    {line}" for line in tail.splitlines())]
    return "\n".join(lines)


def nodes_of(nodes: str) -> list[str]:
    """The nodes to stay away from, as one word of sbatch's --exclude; [] if it is not known where the job was."""
    return [nodes] if re.fullmatch(r"[\w.,\[\]-]+", nodes) else []


def run_here(step: JobStep) -> int:
    """Run a job in the foreground, with its output on the terminal. Returns: its exit code."""
    return subprocess.run(["bash", "-c", script(step)], cwd=step.workdir, env=environment(step), check=False).returncode
