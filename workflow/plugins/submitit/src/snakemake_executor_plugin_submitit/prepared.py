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
    sbatch_request,
    signal_delay_s,
    task_count,
    time_limit_min,
)
from snakemake_executor_plugin_submitit.partitions import ANY_SITE, Site, choose
from snakemake_executor_plugin_submitit.record import content_key, job_files
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.step import JobStep


@dataclass(frozen=True)
class Prepared:
    """`wildcards`: their values, as part of names; `request`: options of sbatch, {} on this machine; `is_small`: may be
    a task of a job array; `is_forced`: what has finished before does not count."""

    job: Any
    rule: str
    wildcards: str
    files: JobFiles
    key: str
    command: str
    limit_min: int
    request: dict[str, Any]
    requested: dict[str, Any]
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
            requeue_limit=0 if "no-requeue" in self.request else settings.requeue_limit,
            setup=str(resources.get("setup") or ""),
            venv=str(resources.get("venv") or ""),
            container=str(resources.get("container") or ""),
            gpus=self.gpus,
        )


def prepare(
    job: Any,
    command: str,
    folder: Path,
    settings: ExecutorSettings,
    is_forced: bool = False,
    site: Site = ANY_SITE,
) -> Prepared:
    """Raises: WorkflowError for a resource that cannot be."""
    resources: Mapping[str, Any] = job.resources
    outputs = sorted(os.path.abspath(output) for output in job.output) or [str(job.get_target_spec())]
    limit, is_slurm = time_limit_min(resources, settings), settings.cluster == "slurm"
    wildcards = "" if job.is_group() else "-".join(map(str, job.wildcards_dict.values()))
    request = sbatch_request(resources, job.threads, settings) if is_slurm else {}
    if is_slurm:
        request.setdefault("comment", f"{job.name}:{wildcards}"[:200])
        if site.needs_srun and limit > settings.array_runtime_min:
            request["signal"] = request["signal"].removeprefix("B:")
    requested: dict[str, Any] = {
        "runtime": limit,
        "threads": int(resources.get("cpus_per_task") or job.threads or 1),
        "mem_mb": int(resources.get("mem_mb") or 0),
        "nodes": int(resources.get("nodes") or 1),
        "gpu": gpu_count(resources),
        "gpu_model": resources.get("gpu_model"),
        "constraint": resources.get("constraint"),
    }
    if is_slurm and site.partitions and "partition" not in request:
        on_node = {
            "threads": requested["threads"] * int(resources.get("tasks_per_node") or 1),
            "mem_mb": requested["mem_mb"] + settings.extra_mem_mb,
        }
        request["partition"] = choose(site.partitions, requested | on_node, job.name)
    return Prepared(
        job=job,
        rule=job.name,
        wildcards=wildcards,
        files=job_files(folder, job.name, outputs),
        key=content_key(job.name, outputs, _params(job)),
        command=command,
        limit_min=limit,
        request=request,
        requested={**requested, "extra_mem_mb": settings.extra_mem_mb},
        gpus=gpu_count(resources),
        is_forced=is_forced,
        is_small=is_slurm and task_count(resources) == 1 and limit <= settings.array_runtime_min,
    )


def _params(job: Any) -> list[Any]:
    ordered = sorted(members(job), key=lambda member: (member.rule.name, sorted(member.output)))
    return [[member.rule.name, list(member.params), member.rule.shellcmd] for member in ordered]


def members(job: Any) -> list[Any]:
    """The jobs of a group, or the job itself."""
    return list(job.jobs) if job.is_group() else [job]


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
