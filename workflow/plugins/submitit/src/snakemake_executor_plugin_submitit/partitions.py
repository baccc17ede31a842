"""What the cluster is like: which partition takes a job that names none, and whether Slurm takes what is named."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm_queue import NoAnswer, ask_slurm

PLACE = ("partition", "account", "qos")
SINFO = ("sinfo", "--noheader", "--exact", "--format", "%P|%a|%l|%c|%m|%D|%G|%f")


@dataclass(frozen=True)
class Partition:
    """The largest job that a partition takes, each limit for one node; names as in the table of the official plugin."""

    name: str
    is_default: bool = False
    max_runtime: float = math.inf
    max_threads: float = math.inf
    max_mem_mb: float = math.inf
    max_nodes: float = math.inf
    max_gpu: float = 0
    available_gpu_models: tuple[str, ...] = ()
    available_constraints: tuple[str, ...] = ()

    def lacks(self, wanted: Mapping[str, Any]) -> str:
        """What the job wants more of than there is, "" if nothing; `wanted`: see `choose`."""
        for name in ("runtime", "threads", "mem_mb", "nodes", "gpu"):
            limit = getattr(self, f"max_{name}")
            if (wanted.get(name) or 0) > limit:
                return f"{name} {limit:g}"
        model, features = wanted.get("gpu_model"), re.findall(r"[\w.-]+", str(wanted.get("constraint") or ""))
        if model and wanted.get("gpu") and self.available_gpu_models and model not in self.available_gpu_models:
            return f"GPUs {','.join(self.available_gpu_models)}"
        if features and self.available_constraints and not {*features} & {*self.available_constraints}:
            return f"features {','.join(self.available_constraints)}"
        return ""


@dataclass(frozen=True)
class Site:
    """`partitions`: to choose from, () where one is named for all jobs; `needs_srun`: see `is_step_told_first`."""

    partitions: tuple[Partition, ...] = ()
    needs_srun: bool = False


ANY_SITE = Site()


def look(settings: ExecutorSettings) -> Site:
    """Ask Slurm once, at the start of a workflow. Raises: WorkflowError for a table of partitions that is wrong."""
    partitions: list[Partition] = []
    if not settings.partition:
        with suppress(NoAnswer):  # then Slurm's own default is used
            partitions = reported()
        if settings.partition_table:
            partitions = read_table(settings.partition_table, partitions)
    return Site(tuple(partitions), is_step_told_first())


def is_step_told_first() -> bool:
    """Whether a preempted job gets its first signal, SIGTERM, in steps of srun only.

    Slurm signals the batch script too if it is set up to send the signal of --signal, or when the grace time is over.
    """
    try:
        config = ask_slurm(("scontrol", "show", "config"))
    except NoAnswer:
        return False
    return "preempt/none" not in config and "send_user_signal" not in config


def reported() -> list[Partition]:
    """The partitions that are up, as sinfo shows them; a partition has the limits of its largest nodes.

    Raises: NoAnswer.
    """
    found: dict[str, Partition] = {}
    for line in ask_slurm(SINFO).splitlines():
        name, state, limit, cpus, memory, nodes, gres, features = line.split("|", 7)
        if state != "up":
            continue
        before = found.get(name.rstrip("*"), Partition(name.rstrip("*"), max_threads=0, max_mem_mb=0, max_nodes=0))
        gpus = re.findall(r"gpu(?::([^:,(]+))??:(\d+)", gres)
        found[before.name] = replace(
            before,
            is_default=name.endswith("*"),
            max_runtime=minutes(limit),
            max_threads=max(before.max_threads, float(cpus.rstrip("+"))),
            max_mem_mb=max(before.max_mem_mb, float(memory.rstrip("+"))),
            max_nodes=before.max_nodes + int(nodes),
            max_gpu=max(before.max_gpu, sum(int(count) for _, count in gpus)),
            available_gpu_models=tuple(dict.fromkeys([*before.available_gpu_models, *(m for m, _ in gpus if m)])),
            available_constraints=tuple(dict.fromkeys([*before.available_constraints, *features.split(",")])),
        )
    return list(found.values())


def read_table(path: str, known: Sequence[Partition]) -> list[Partition]:
    """The partitions of a YAML table, with its limits in place of those that Slurm reports.

    Raises: WorkflowError.
    """
    try:
        given = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))["partitions"]
        rows = {str(name): dict(limits or {}) for name, limits in given.items()}
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise WorkflowError(f"--submitit-partition-table {path}: not a table of partitions: {error!r}") from error
    keys = [field.name for field in fields(Partition)][2:]
    by_name, table = {partition.name: partition for partition in known}, []
    for name, limits in rows.items():
        if unknown := sorted(limits.keys() - set(keys)):
            raise WorkflowError(f"{path}: partition {name}: no such limit: {unknown[0]}; there are {', '.join(keys)}")
        if known and name not in by_name:
            raise WorkflowError(f"{path}: Slurm has no partition {name}; there are {', '.join(by_name)}")
        if "max_runtime" in limits:
            limits["max_runtime"] = minutes(limits["max_runtime"])
        lists = {key: tuple(value) for key, value in limits.items() if key.startswith("available_")}
        table.append(replace(by_name.get(name, Partition(name, max_gpu=math.inf)), **{**limits, **lists}))
    return table


def choose(partitions: Sequence[Partition], wanted: Mapping[str, Any], rule: str) -> str:
    """The partition for a job that names none: one without GPUs if it needs none, then Slurm's default, then the one
    with the shortest time limit.

    `wanted`: runtime (minutes), threads, mem_mb, gpu (each of one node), nodes, gpu_model, constraint.
    Raises: WorkflowError when none takes it.
    """
    lacking = {partition.name: partition.lacks(wanted) for partition in partitions}
    fitting = [partition for partition in partitions if not lacking[partition.name]]
    if not fitting:
        asked = ", ".join(f"{name}={value}" for name, value in wanted.items() if value)
        limits = "; ".join(f"{name} has at most {lack}" for name, lack in lacking.items())
        raise WorkflowError(f"rule {rule}: no partition takes {asked}: {limits}")
    return min(
        fitting,
        key=lambda found: (found.max_gpu > 0 and not wanted.get("gpu"), not found.is_default, found.max_runtime),
    ).name


def check_place(request: Mapping[str, Any], source: str) -> None:
    """Have Slurm say whether it takes jobs of this partition, account and qos; nothing is submitted.

    Raises: WorkflowError with its refusal in one line.
    """
    place = [f"--{name}={request[name]}" for name in PLACE if request.get(name)]
    if not place:
        return
    command = ["sbatch", "--test-only", "--time=1", *place, "--wrap=true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # the submission itself will show what is wrong
    said = " ".join(done.stderr.split())
    if done.returncode and re.search(r"invalid|not permitted|denied|unknown|not exist", said, re.IGNORECASE):
        try:
            names = f"; partitions: {', '.join(partition.name for partition in reported())}"
        except NoAnswer:
            names = ""
        raise WorkflowError(f"{source}: Slurm refuses {' '.join(place)}: {said}{names}")


def minutes(limit: object) -> float:
    """Of a number of minutes, or of a time limit as Slurm writes it: MM, MM:SS, HH:MM:SS, D-HH[:MM[:SS]], infinite."""
    text = str(limit).strip().lower()
    if text in ("infinite", "unlimited", "n/a", "inf"):
        return math.inf
    days, _, clock = text.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    if days or len(parts) == 3:
        hours, mins, seconds = [*parts, 0.0, 0.0][:3]
    else:
        hours, (mins, seconds) = 0.0, [*parts, 0.0][:2]
    return 1440 * float(days or 0) + 60 * hours + mins + seconds / 60
