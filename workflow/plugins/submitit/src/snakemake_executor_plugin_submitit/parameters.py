"""From the resources of a rule to the options of sbatch."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.settings import ExecutorSettings

# The official Slurm plugin's names, each with the option of sbatch that it becomes; the last one given counts.
_OPTIONS = {
    "partition": "partition",
    "slurm_partition": "partition",
    "account": "account",
    "slurm_account": "account",
    "qos": "qos",
    "slurm_qos": "qos",
    "reservation": "reservation",
    "slurm_reservation": "reservation",
    "constraint": "constraint",
    "slurm_constraint": "constraint",
    "exclude": "exclude",
    "clusters": "clusters",
    "gres": "gres",
    "cpus_per_gpu": "cpus-per-gpu",
}
_OWN = {
    *("runtime", "mem_mb", "mem_mb_per_cpu", "cpus_per_task", "gpus", "gpu", "gpu_model"),
    *("nodes", "tasks", "tasks_per_node", "mpi", "slurm_requeue", "slurm_extra", "setup", "venv", "container"),
}
_SNAKEMAKES = {"_cores", "_nodes", "_job_count", "attempt", "mem", "mem_mib", "disk", "disk_mb", "disk_mib", "tmpdir"}
UNDERSTOOD = _OWN | _OPTIONS.keys()
# Options of sbatch that somebody might give as a resource; `slurm_extra` takes them.
_SBATCH = {
    *("dependency", "distribution", "exclusive", "gpus_per_node", "gpus_per_task", "hint", "licenses", "mail_type"),
    *("mail_user", "mem_per_cpu", "mem_per_gpu", "nice", "nodelist", "ntasks", "ntasks_per_node", "switches", "time"),
}


def time_limit_min(resources: Mapping[str, Any], settings: ExecutorSettings) -> int:
    limit = math.ceil(float(resources.get("runtime") or settings.timeout_min))
    if limit < 1:
        raise WorkflowError(f"resource runtime={limit}: give a time limit of at least one minute")
    return limit


def signal_delay_s(limit_min: int, settings: ExecutorSettings) -> int:
    """Never more than a third of the time limit."""
    return max(1, min(settings.signal_delay_s, limit_min * 20))


def gpu_count(resources: Mapping[str, Any]) -> int:
    """GPUs of each node, also those that only `gres` names, as `gpu:4` or `gpu:h100:4`."""
    in_gres = re.search(r"\bgpu(?::[^:,]+)?(?::(\d+))?(?=,|$)", str(resources.get("gres") or ""))
    return int((in_gres[1] or 1) if in_gres else resources.get("gpus") or resources.get("gpu") or 0)


def task_count(resources: Mapping[str, Any]) -> int:
    in_nodes = int(resources.get("nodes") or 1) * int(resources.get("tasks_per_node") or 1)
    return max(in_nodes, int(resources.get("tasks") or 1))


def sbatch_request(resources: Mapping[str, Any], threads: int, settings: ExecutorSettings) -> dict[str, Any]:
    """The options of sbatch by their long names; True for one without a value.

    Of a job with several tasks one process starts, on the first node; its rule calls srun or mpirun.
    Raises: WorkflowError for what sbatch could not be asked for.
    """
    limit = time_limit_min(resources, settings)
    request: dict[str, Any] = {
        "time": limit,
        "signal": f"B:USR2@{signal_delay_s(limit, settings)}",  # to our process; it tells those that listen
        "cpus-per-task": int(resources.get("cpus_per_task") or threads or 1),
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "reservation": settings.reservation,
        "no-requeue" if settings.no_requeue or resources.get("slurm_requeue") is False else "requeue": True,
    }
    request.update(_layout(resources))
    if resources.get("mem_mb_per_cpu"):
        request["mem-per-cpu"] = f"{int(resources['mem_mb_per_cpu'])}M"
    elif resources.get("mem_mb"):
        request["mem"] = f"{int(resources['mem_mb']) + settings.extra_mem_mb}M"
    if gpu_count(resources) and not resources.get("gres"):
        model = resources.get("gpu_model")
        request["gpus-per-node"] = f"{model}:{gpu_count(resources)}" if model else gpu_count(resources)
    request.update({option: resources[name] for name, option in _OPTIONS.items() if resources.get(name)})
    request = {option: value for option, value in request.items() if value is not None}
    request.update(sbatch_options(settings.extra or "", "--submitit-extra"))
    request.update(sbatch_options(str(resources.get("slurm_extra") or ""), "resource slurm_extra"))
    if "clusters" in request:
        raise WorkflowError(f"--clusters={request['clusters']}: only the cluster of SLURM_CONF is asked about its jobs")
    if "no-requeue" in request:
        request.pop("requeue", None)
    return request


def _layout(resources: Mapping[str, Any]) -> dict[str, int]:
    """How many nodes and tasks: `tasks` alone leaves it to Slurm on how many nodes they run."""
    given = {name: int(resources.get(name) or 0) for name in ("nodes", "tasks", "tasks_per_node")}
    if not given["tasks"]:
        return {"nodes": given["nodes"] or 1, "ntasks-per-node": given["tasks_per_node"] or 1}
    options = {"nodes": given["nodes"], "ntasks": given["tasks"], "ntasks-per-node": given["tasks_per_node"]}
    return {option: value for option, value in options.items() if value}


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


def not_understood(names: Iterable[str], commands: Sequence[str | None], limits: Collection[str]) -> list[str]:
    """The resources that neither this plugin nor the rule uses; `limits`: those of `--resources`.

    Raises: WorkflowError for one that is meant for Slurm, or misspelt.
    """
    used = {name for command in commands for name in re.findall(r"\bresources\.(\w+)", command or "")}
    unknown = sorted(set(names) - UNDERSTOOD - _SNAKEMAKES - used - set(limits))
    for name in unknown:
        if name.removeprefix("slurm_") in _SBATCH:
            option = name.removeprefix("slurm_").replace("_", "-")
            raise WorkflowError(f"resource {name}: not understood; type slurm_extra='--{option}=...'")
        close = difflib.get_close_matches(name, UNDERSTOOD, 1, cutoff=0.8)
        if close or name.startswith("slurm_"):
            hint = f"; did you mean {close[0]}?" if close else "; type slurm_extra='--option=...'"
            raise WorkflowError(f"resource {name}: not understood{hint}")
    return unknown


def with_changes(request: dict[str, Any], excluded: Sequence[str], memory: float) -> dict[str, Any]:
    """The options of a further submission: away from nodes that failed, with more memory."""
    changed = dict(request)
    if excluded:
        changed["exclude"] = ",".join(filter(None, [str(changed.get("exclude") or ""), *excluded]))
    for key in ("mem", "mem-per-cpu"):
        if key in changed:
            changed[key] = f"{math.ceil(int(str(changed[key]).removesuffix('M')) * memory)}M"
    return changed
