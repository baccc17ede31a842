"""From the resources of a rule to the parameters of submitit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.settings import ExecutorSettings

# Names of the official slurm plugin first; each with the parameter of submitit or option of sbatch that it becomes.
_PLAIN = {
    "slurm_partition": "partition",
    "partition": "partition",
    "slurm_account": "account",
    "account": "account",
    "slurm_qos": "qos",
    "qos": "qos",
    "constraint": "constraint",
    "gres": "gres",
    "cpus_per_gpu": "cpus_per_gpu",
    "exclude": "exclude",
}
_OPTIONS = ("reservation", "clusters")


def time_limit_min(resources: Mapping[str, Any], settings: ExecutorSettings) -> int:
    limit = math.ceil(float(resources.get("runtime") or settings.timeout_min))
    if limit < 1:
        raise WorkflowError(f"resource runtime={limit}: give a time limit of at least one minute")
    return limit


def signal_delay_s(limit_min: int, settings: ExecutorSettings) -> int:
    """Never more than a third of the time limit."""
    return max(1, min(settings.signal_delay_s, limit_min * 20))


def gpu_count(resources: Mapping[str, Any]) -> int:
    return int(resources.get("gpus") or resources.get("gpu") or 0)


def tasks(resources: Mapping[str, Any]) -> int:
    return int(resources.get("nodes") or 1) * int(resources.get("tasks_per_node") or 1)


def slurm_parameters(resources: Mapping[str, Any], threads: int, settings: ExecutorSettings) -> dict[str, Any]:
    """Parameters for `SlurmExecutor.update_parameters`.

    A job of several tasks asks Slurm for them, but submitit starts one process on the first node; the rule calls srun.
    Raises: WorkflowError for resources that would be dropped.
    """
    for name in ("mpi", "tasks"):
        if resources.get(name) not in (None, 0, 1, ""):
            raise WorkflowError(
                f"resource {name}={resources[name]}: this executor starts one process; give `nodes` and "
                "`tasks_per_node`, and let the rule call srun or mpirun"
            )
    limit = time_limit_min(resources, settings)
    cpus = int(resources.get("cpus_per_task") or threads or 1)
    further: dict[str, Any] = {"requeue": True}
    parameters: dict[str, Any] = {
        "time": limit,
        "signal_delay_s": signal_delay_s(limit, settings),
        "nodes": int(resources.get("nodes") or 1),
        "ntasks_per_node": int(resources.get("tasks_per_node") or 1),
        "cpus_per_task": cpus,
        # a step does not take over --cpus-per-task since Slurm 22.05
        "srun_args": ["--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--overlap"],
        "wckey": None,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "additional_parameters": further,
    }
    if resources.get("mem_mb_per_cpu"):
        parameters["mem_per_cpu"] = f"{int(resources['mem_mb_per_cpu'])}M"
    elif resources.get("mem_mb"):
        parameters["mem"] = f"{int(resources['mem_mb']) + settings.extra_mem_mb}M"
    if gpu_count(resources) and not resources.get("gres"):
        model = resources.get("gpu_model")
        parameters["gpus_per_node"] = f"{model}:{gpu_count(resources)}" if model else gpu_count(resources)
    for name, parameter in reversed(_PLAIN.items()):
        if resources.get(name):
            parameters[parameter] = resources[name]
    further.update({name: resources[name] for name in _OPTIONS if resources.get(name)})
    further.update(sbatch_options(settings.extra or "", "--submitit-extra"))
    further.update(sbatch_options(str(resources.get("slurm_extra") or ""), "resource slurm_extra"))
    if "no-requeue" in further:
        del further["requeue"]
    return parameters


def sbatch_options(text: str, source: str) -> dict[str, Any]:
    """The options in a piece of command line: `--comment='a b' --exclusive` as {"comment": "a b", "exclusive": True}.

    Raises: WorkflowError for what is not an option with a long name.
    """
    options: dict[str, Any] = {}
    words: Sequence[str] = shlex.split(text)
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            options[name] = value if has_value else True
        elif name and options[name] is True:
            options[name] = word
        else:
            raise WorkflowError(f"{source}: '{word}' is not an option of sbatch with a long name, like --nice=100")
    return options


def with_changes(parameters: dict[str, Any], excluded: Sequence[str], memory: float) -> dict[str, Any]:
    """The parameters of a further submission: away from nodes that failed, with more memory."""
    changed = dict(parameters)
    if excluded:
        changed["exclude"] = ",".join(filter(None, [str(changed.get("exclude") or ""), *excluded]))
    for key in ("mem", "mem_per_cpu"):
        if key in changed:
            changed[key] = f"{math.ceil(int(str(changed[key]).removesuffix('M')) * memory)}M"
    return changed
