"""Convert a job of Snakemake to its submission: the options of sbatch for its resources, and its step."""

import difflib
import math
import os
import re
import shlex
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import NO_ANSWER, SlurmState
from snakemake_executor_plugin_submitit.step import JobStep
from snakemake_executor_plugin_submitit.store import End, JobFiles, Record, digest, job_files

_WITH_PREFIX = ("partition", "account", "qos", "reservation", "constraint")
# The sbatch option of each resource. The names that the official Slurm plugin reads are among them; the first five
# options also have a second name, with or without `slurm_`. If two resources set the same option, the one that is later
# in this dictionary counts.
_OPTIONS = {
    **{f"{prefix}{name}": name for name in _WITH_PREFIX for prefix in ("", "slurm_")},
    "exclude": "exclude",
    "clusters": "clusters",
    "gres": "gres",
    "cpus_per_gpu": "cpus-per-gpu",
}
NUMBERS = {
    "runtime", "mem_mb", "mem_mb_per_cpu", "cpus_per_task", "gpus", "gpu", "nodes", "tasks", "tasks_per_node",
}  # fmt: skip
_TEXTS = {"gpu_model", "mpi", "slurm_requeue", "slurm_extra", "setup", "venv", "container"}
SNAKEMAKES = {"_cores", "_nodes", "_job_count", "attempt", "mem", "mem_mib", "disk", "disk_mb", "disk_mib", "tmpdir"}
NO_LIMITS: Mapping[str, int] = {}
MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
EITHER = (MEMORY, {"requeue", "no-requeue"})  # of each set, only one option counts
# Options of sbatch that must not be given directly, because the plugin sets them or derives more than the option.
INSTEAD = {
    "time": "set the resource runtime instead",
    "partition": "set the resource slurm_partition instead",
    "signal": "set --submitit-signal-delay-s instead",
    "job-name": "set --submitit-jobname-prefix instead",
    **dict.fromkeys(("array", "output", "error", "open-mode"), "only the plugin sets it; remove it"),
}
UNDERSTOOD = NUMBERS | _TEXTS | _OPTIONS.keys()
# Options of sbatch that users might give as a resource; they belong in `slurm_extra`.
_SBATCH = {
    "dependency", "distribution", "exclusive", "gpus_per_node", "gpus_per_task", "hint", "licenses", "mail_type",
    "mail_user", "mem_per_cpu", "mem_per_gpu", "nice", "nodelist", "ntasks", "ntasks_per_node", "switches", "time",
}  # fmt: skip


@dataclass(eq=False)
class Job(SubmittedJobInfo):
    """A job of Snakemake, `job`, and its last submission.

    step: the part that all its submissions share. request: options of sbatch; {} if it runs on this machine.
    is_small: whether the job may be a task of a job array. is_forced: whether the job runs even if its outputs exist.
    waits_for: the id of a cancelled job in Slurm that may still write to the same outputs.
    The other fields describe the last submission: `record`; `process`, if this driver started it on this machine;
    `slurm`, its state in Slurm; `doubt`, the state in which the job seems to have ended, and since when.
    """

    step: JobStep = field(kw_only=True)
    record: Record = field(kw_only=True)
    request: dict[str, Any] = field(default_factory=dict)
    is_small: bool = False
    is_forced: bool = False
    waits_for: str = ""
    process: subprocess.Popen[bytes] | None = None
    slurm: SlurmState = NO_ANSWER
    doubt: tuple[str, float] | None = None

    @property
    def files(self) -> JobFiles:
        return self.step.files

    @property
    def end(self) -> End | None:
        """How the last submission ended, as the job wrote it.

        It is None if the job wrote nothing, or if Slurm's state counts instead (`End.is_provisional`).
        """
        end = self.files.end(self.record.number)
        return None if end and end.is_provisional else end

    @property
    def stderr(self) -> Path:
        """The path of submitit's standard error."""
        from submitit.core.utils import JobPaths

        return JobPaths(self.record.folder, self.record.job_id, task_id=0).stderr

    def save(self, **changes: Any) -> None:
        """Change fields of the record, also on disk. Raises: OSError."""
        self.record = replace(self.record, **changes)
        self.external_jobid = self.record.job_id or None
        store.save(self.files, self.record)


def prepare(
    job: Any,
    command: str,
    folder: Path,
    settings: ExecutorSettings,
    is_forced: bool,
    needs_srun: bool = False,
    limits: Mapping[str, int] = NO_LIMITS,
) -> Job:
    """Return the job with its step and request.

    needs_srun: see `signals_steps_first`. limits: see `time_limits`.
    Raises: WorkflowError for resources that cannot be requested.
    """
    resources = job.resources
    outputs = sorted(os.path.abspath(output) for output in job.output) or [str(job.get_target_spec())]
    wildcards = "" if job.is_group() else "-".join(map(str, job.wildcards_dict.values()))
    asked = requested(resources, job.threads, settings, limits)
    is_short, request = asked["runtime"] <= settings.array_runtime_min, {}
    if settings.cluster == "slurm":
        request = sbatch_request(resources, job.threads, settings, limits)
        if needs_srun and not is_short:
            request["signal"] = request["signal"].removeprefix("B:")
    ordered = sorted(members(job), key=lambda member: (member.rule.name, sorted(member.output)))
    params = [[member.rule.name, list(member.params), member.rule.shellcmd] for member in ordered]
    record = Record(
        key=digest([job.name, outputs, params]),
        name="",
        number=0,
        cluster=settings.cluster,
        folder="",
        rule=job.name,
        wildcards=wildcards,
        requested=asked,
    )
    step = JobStep(
        files=job_files(folder, job.name, outputs),
        record=record,
        command=command,
        workdir=os.getcwd(),
        signal_delay_s=signal_delay_s(asked["runtime"], settings),
        requeue_limit=0 if "no-requeue" in request else settings.requeue_limit,
        **{name: str(resources.get(name) or "") for name in ("setup", "venv", "container")},
    )
    is_small = is_short and {"nodes": 1, "ntasks-per-node": 1}.items() <= request.items()
    return Job(job, step=step, record=record, request=request, is_small=is_small, is_forced=is_forced)


def members(job: Any) -> list[Any]:
    """Return the jobs of a group, or the job itself."""
    return list(job.jobs) if job.is_group() else [job]


def has_all_outputs(job: Any) -> bool:
    """Return whether the job has outputs, all of them exist, and none is older than an existing input.

    Inputs marked as ancient do not count.
    """
    outputs = {os.path.abspath(output) for output in job.output}
    if not outputs or not all(map(os.path.exists, outputs)):
        return False
    oldest = min(map(os.path.getmtime, outputs))
    inputs = {os.path.abspath(file) for file in job.input if not getattr(file, "flags", {}).get("ancient")}
    return all(os.path.getmtime(path) <= oldest for path in inputs - outputs if os.path.exists(path))


def requested(
    resources: Mapping[str, Any], threads: int, settings: ExecutorSettings, limits: Mapping[str, int] = NO_LIMITS
) -> dict[str, int]:
    """Return the requested runtime in minutes, threads of a task, and mem_mb and number of GPUs of a node.

    The GPUs may also be given by `gres` alone, as in `gpu:h100:4` or `gpu:4`. The runtime is at most the longest limit
    of the partitions, because Slurm would let a longer job wait for ever.
    Raises: WorkflowError.
    """
    partition = resources.get("slurm_partition") or resources.get("partition") or settings.partition
    partitions = str(partition or "").split(",")
    longest = max(limits.get(partition, math.inf) for partition in partitions)
    in_gres = re.search(r"\bgpu(?::(\d+)|:[^:,]+(?::(\d+))?)?(?=,|$)", str(resources.get("gres") or ""))
    return {
        "runtime": min(longest, math.ceil(number(resources, "runtime", is_whole=False)) or settings.timeout_min),
        "threads": number(resources, "cpus_per_task") or threads or 1,
        "mem_mb": number(resources, "mem_mb"),
        "gpu": int(in_gres[1] or in_gres[2] or 1) if in_gres else number(resources, "gpus") or number(resources, "gpu"),
    }


def number(resources: Mapping[str, Any], name: str, is_whole: bool = True) -> Any:
    """Return a numeric resource, 0 if unset or not yet known. Raises: WorkflowError if it is negative or invalid."""
    value = resources.get(name) or 0
    if value == "<TBD>":  # a function of files that do not exist yet
        return 0
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf or (is_whole and found % 1):
        raise WorkflowError(f"resource {name}={value}: give a {'whole ' if is_whole else ''}number, at least 0")
    return int(found) if is_whole else found


def signal_delay_s(limit_min: int, settings: ExecutorSettings) -> int:
    """Return the seconds between signal and time limit: the setting, but at most a third of the limit, at least 1."""
    return max(1, min(settings.signal_delay_s, limit_min * 20))


def sbatch_request(
    resources: Mapping[str, Any], threads: int, settings: ExecutorSettings, limits: Mapping[str, int] = NO_LIMITS
) -> dict[str, Any]:
    """Return the options of sbatch by their long names; an option without a value has True.

    A job with several tasks starts one process, on the first node; its rule calls srun or mpirun. With `tasks` alone,
    Slurm chooses the number of nodes. Raises: WorkflowError for resources that cannot be requested.
    """
    asked = requested(resources, threads, settings, limits)
    tasks, nodes, tasks_per_node = (number(resources, name) for name in ("tasks", "nodes", "tasks_per_node"))
    request: dict[str, Any] = {
        "time": asked["runtime"],
        "signal": f"B:USR2@{signal_delay_s(asked['runtime'], settings)}",  # to our process, which relays it
        "cpus-per-task": asked["threads"],
        **{name: getattr(settings, name) for name in ("partition", "account", "qos", "reservation")},
        "nodes": nodes or (None if tasks else 1),
        "ntasks": tasks or None,
        "ntasks-per-node": tasks_per_node or (None if tasks else 1),
        "no-requeue" if settings.no_requeue or resources.get("slurm_requeue") is False else "requeue": True,
    }
    if per_cpu := number(resources, "mem_mb_per_cpu"):
        if asked["mem_mb"]:  # either may be a default, which must not override the rule
            both = f"mem_mb={asked['mem_mb']} and mem_mb_per_cpu={per_cpu}"
            raise WorkflowError(f"resources {both}: give one of them, and set the other to 0")
        request["mem-per-cpu"] = f"{per_cpu}M"
    elif asked["mem_mb"]:
        request["mem"] = f"{asked['mem_mb'] + settings.extra_mem_mb}M"
    if asked["gpu"] and not resources.get("gres"):
        model = resources.get("gpu_model")
        request["gpus-per-node"] = f"{model}:{asked['gpu']}" if model else asked["gpu"]
    request.update({option: resources[name] for name, option in _OPTIONS.items() if resources.get(name)})
    request = {option: value for option, value in request.items() if value is not None}
    for text, source in ((settings.extra, "--submitit-extra"), (resources.get("slurm_extra"), "resource slurm_extra")):
        further = sbatch_options(str(text or ""), source)
        for name in sorted(further.keys() & INSTEAD.keys()):
            raise WorkflowError(f"{source}: --{name}: {INSTEAD[name]}")
        for options in EITHER:
            if further.keys() & options:
                request = {option: value for option, value in request.items() if option not in options}
        request.update(further)
    if "clusters" in request:
        raise WorkflowError(f"--clusters={request['clusters']}: only the cluster of SLURM_CONF is asked about its jobs")
    return request


def sbatch_options(text: str, source: str) -> dict[str, Any]:
    """Parse options of a command line: `--comment='a b' --exclusive` is {"comment": "a b", "exclusive": True}.

    Raises: WorkflowError for a word that is neither a long option nor its value, and for an open quote.
    """
    options: dict[str, Any] = {}
    name = ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WorkflowError(f"{source}={text}: {str(error).lower()}; close it") from error
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            options[name] = value if has_value else True
        elif name and options[name] is True:
            options[name] = word
        else:
            raise WorkflowError(f"{source}: '{word}' is not an option of sbatch with a long name, like --nice=100")
    return options


def not_understood(names: Iterable[str], readers: Sequence[Any], limits: Collection[str]) -> list[str]:
    """Return the resources that neither this plugin nor the rule uses.

    limits: the names of `--resources`. readers: the rule's command, inputs and params; a function among them may use
    any resource, so the result is then empty.
    Raises: WorkflowError for a resource that is meant for Slurm, or misspelt.
    """
    used = {name for reader in readers for name in re.findall(r"\bresources\.(\w+)", str(reader))}
    unknown = sorted(set(names) - UNDERSTOOD - SNAKEMAKES - used - set(limits))
    for name in unknown:
        option = name.removeprefix("slurm_")
        close = difflib.get_close_matches(name, UNDERSTOOD, 1, cutoff=0.8)
        if close or option in _SBATCH or option != name:
            option = option.replace("_", "-")
            hint = INSTEAD.get(option, f"type slurm_extra='--{option}=...'")
            hint = f"did you mean {close[0]}?" if close else hint
            raise WorkflowError(f"resource {name}: not understood; {hint}")
    return [] if any(callable(reader) for reader in readers) else unknown


def with_changes(request: dict[str, Any], excluded: Sequence[str], memory: float) -> dict[str, Any]:
    """Return the options of another submission, which avoids nodes that failed and may have more memory."""
    changed = dict(request)
    if excluded:
        changed["exclude"] = ",".join([*filter(None, [changed.get("exclude")]), *excluded])
    for key in sorted(MEMORY):
        if key in changed:  # such as 4000M, or 2G from slurm_extra
            changed[key] = re.sub(r"\d+", lambda number: str(math.ceil(int(number[0]) * memory)), str(changed[key]))
    return changed
