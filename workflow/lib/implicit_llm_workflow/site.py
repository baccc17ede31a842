"""Read the block of profiles/cluster that describes a cluster: its kinds of nodes, and the jobs on each kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.values import SOME, Count, Number, Text
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml

CLUSTER_PROFILE = "profiles/cluster"
PROFILE_FILE, VARIABLES = "config.yaml", "__variables__"


@dataclass(frozen=True)
class HardwareClass:
    """A kind of nodes; `gpus`, `cpus` and `mem_gb` are those of one node.

    `gpu_model`: the name of the GPU in Slurm. `card`: the name of the GPU in workflow/config/estimate/hardware.yaml.
    The default of `card` is the name of the class; without `gpu_model`, a GPU of any type is requested.
    """

    partition: Text
    constraint: str
    venv: str
    gpus: Number
    cpus: Count
    mem_gb: Count
    setup: str
    container: str = ""
    gpu_model: str = ""
    card: str = ""


@dataclass(frozen=True)
class RuleResources:
    """The hardware class of a rule, and the resources of its jobs.

    A numeric resource except `gpus` may be the text of an expression of `wildcards`. `gpus`, `processes`: for each
    node. `runtime`: in minutes.
    """

    class_: str
    gpus: Number = 0
    nodes: Count | str = 1
    processes: Count | str | None = None
    runtime: Count | str | None = None
    mem_mb: Count | str | None = None
    threads: Count | str | None = None
    micro_batch_size: Number | str | None = None
    kernels: str | None = None
    gradient_checkpointing: str | None = None
    shard_optimizer: str | None = None
    cuda_graphs: str | None = None

    def num_nodes(self, run: str, phase: str) -> int:
        """Return the number of nodes of a training job. Raises: ConfigError if `nodes` is an expression that fails."""
        if isinstance(self.nodes, int):
            return self.nodes
        try:
            return int(eval(self.nodes, {"wildcards": SimpleNamespace(run=run, phase=phase)}))  # noqa: S307
        except Exception as error:  # the user's expression may raise anything
            raise ConfigError(
                f"{CLUSTER_PROFILE}: nodes: {self.nodes!r} gives {type(error).__name__} for run {run!r}: {error}; give "
                "a number, or an expression of wildcards.run and wildcards.phase"
            ) from error


@dataclass(frozen=True)
class OtherJobs:
    partition: Text


@dataclass(frozen=True)
class Site:
    """The block of profiles/cluster that users edit for a new cluster."""

    classes: Annotated[dict[str, HardwareClass], SOME]
    other_jobs: OtherJobs
    rules: dict[str, RuleResources]
    account: str = ""

    def place(self, task: str, run: str, phase: str) -> tuple[str, int]:
        """Return the `card` and the number of the GPUs of a training job, or ("cpu", 1) for a job without GPUs.

        A task without a rule uses the rule of language models; without either rule, the job has no GPUs. Raises:
        ConfigError if the number of nodes is an expression that fails.
        """
        use = self.rules.get(f"train_{task}", self.rules.get("train_language_model"))
        if use is None or not use.gpus:
            return "cpu", 1
        return self.classes[use.class_].card or use.class_, use.gpus * use.num_nodes(run, phase)


def fill_site(block: dict[str, Any], where: str) -> Site:
    """Return the site that a block describes. Raises: ConfigError, which begins with `where`, for a wrong value."""
    site = fill(Site, block, where)
    for rule, use in site.rules.items():
        if use.class_ not in site.classes:
            hint = nearest(use.class_, site.classes)
            raise ConfigError(f"{where}: rules.{rule}.class: there is no class {use.class_!r}; {hint}")
        if use.gpus > (most := site.classes[use.class_].gpus):
            raise ConfigError(
                f"{where}: rules.{rule}.gpus: a node of class {use.class_!r} has {most}, not {use.gpus}; give fewer"
            )
    return site


def read_site(profile: str, project: Path) -> Site:
    """Return the site of this profile, or else of the cluster profile in the working directory or in the project.

    Raises: ConfigError if none of these profiles has the block, or if a value is wrong.
    """
    for folder in (Path(profile), Path(CLUSTER_PROFILE), project / CLUSTER_PROFILE):
        path = folder / PROFILE_FILE
        block = read_yaml(path).get(VARIABLES) if path.is_file() else None
        if block:
            return fill_site(block, str(path))
    raise ConfigError(f"{CLUSTER_PROFILE}/{PROFILE_FILE}: is missing; restore the file")
