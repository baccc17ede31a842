"""A job of Snakemake, ready to be submitted: what it makes, what it runs, what it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit.job_files import JobFiles
from snakemake_executor_plugin_submitit.parameters import (
    gpu_count,
    signal_delay_s,
    slurm_parameters,
    tasks,
    time_limit_min,
)
from snakemake_executor_plugin_submitit.record import content_key, job_files
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.step import JobStep


@dataclass(frozen=True)
class Prepared:
    """`parameters`: of submitit's executor; `is_small`: may be a task of a job array; `is_forced`: what has
    finished before does not count."""

    job: Any
    rule: str
    files: JobFiles
    key: str
    command: str
    limit_min: int
    parameters: dict[str, Any]
    gpus: int
    is_small: bool
    is_forced: bool

    def step(self, number: int, settings: ExecutorSettings) -> JobStep:
        resources = self.job.resources
        return JobStep(
            files=self.files,
            number=number,
            command=self.command,
            workdir=os.getcwd(),
            logs=tuple(str(log) for log in self.job.log or ()),
            limit_s=60.0 * self.limit_min,
            signal_delay_s=signal_delay_s(self.limit_min, settings),
            requeue_limit=settings.requeue_limit,
            setup=str(resources.get("setup") or ""),
            venv=str(resources.get("venv") or ""),
        )


def prepare(job: Any, command: str, folder: Path, settings: ExecutorSettings, is_forced: bool = False) -> Prepared:
    """Raises: WorkflowError for a resource that cannot be."""
    resources: Mapping[str, Any] = job.resources
    outputs = sorted(os.path.abspath(output) for output in job.output) or [str(job.get_target_spec())]
    limit = time_limit_min(resources, settings)
    if settings.cluster == "slurm":
        parameters = slurm_parameters(resources, job.threads, settings)
        parameters["comment"] = _comment(job)
    else:
        parameters = {"timeout_min": limit, "signal_delay_s": signal_delay_s(limit, settings)}
    return Prepared(
        job=job,
        rule=job.name,
        files=job_files(folder, job.name, outputs),
        key=content_key(job.name, outputs, _params(job)),
        command=command,
        limit_min=limit,
        parameters=parameters,
        gpus=gpu_count(resources),
        is_forced=is_forced,
        is_small=settings.cluster == "slurm" and tasks(resources) == 1,
    )


def _params(job: Any) -> list[Any]:
    ordered = sorted(members(job), key=lambda member: (member.rule.name, sorted(member.output)))
    return [[member.rule.name, list(member.params), member.rule.shellcmd] for member in ordered]


def members(job: Any) -> list[Any]:
    """The jobs of a group, or the job itself."""
    return list(job.jobs) if job.is_group() else [job]


def _comment(job: Any) -> str:
    wildcards = "" if job.is_group() else ",".join(f"{k}={v}" for k, v in job.wildcards_dict.items())
    return f"{job.name}:{wildcards}"[:200]


def has_all_outputs(job: Any) -> bool:
    """Whether every output is there, and none is older than an input (but for those marked as ancient)."""
    outputs = [str(output) for output in job.output]
    if not outputs or not all(os.path.exists(output) for output in outputs):
        return False
    oldest = min(os.path.getmtime(output) for output in outputs)
    inputs = [str(file) for file in job.input if not getattr(file, "flags", {}).get("ancient")]
    own = {os.path.abspath(output) for output in outputs}
    return all(
        os.path.getmtime(path) <= oldest for path in inputs if os.path.exists(path) and os.path.abspath(path) not in own
    )
