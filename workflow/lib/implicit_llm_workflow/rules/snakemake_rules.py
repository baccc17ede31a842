"""Provide the input functions of the rules: functions of wildcards that query the plan."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from implicit_llm_contracts.config.flops import UncountedModel, num_parameters
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.manifest import MANIFEST
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow.estimates import STATE_BYTES
from implicit_llm_workflow.experiment_files.experiment import build_experiment, load_experiment, planned_experiment
from implicit_llm_workflow.experiment_files.yaml_files import ConfigFiles, read_yaml, shown_path
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.graph import build_graph
from implicit_llm_workflow.planning.plan import PLANNED, Plan
from implicit_llm_workflow.project_dirs import ENVIRONMENTS_DIR
from implicit_llm_workflow.rules.snakemake_internals import resource_of

# The wildcards of a stage's rules, in the order in which they form a node's name.
_NAME_WILDCARDS = {
    "data": ("data",),
    "train": ("run", "phase"),
    "evaluate": ("run", "phase", "evaluation"),
    "checkpoint": ("peer",),
    "report": (),
    "excerpt": ("excerpt",),
}
HARDWARE = "hardware"  # the resource with which a profile assigns a class of machines to a rule

_FUNCTION = TypeVar("_FUNCTION", bound=Callable[..., Any])
_NUMBER = re.compile(r"(?<=-)[0-9]{5}$")
_NOTHING = r"[^\s\S]"  # matches no character


def plan_from_snakemake(config: Mapping[str, Any], config_paths: list[str]) -> Plan:
    """Return the plan of the configuration that Snakemake has merged.

    In the process of a job, this configuration is the experiment that the driver read, and the plan has no identities.
    Raises: UserError with a message of one line.
    """
    if PLANNED in config:
        return Plan(planned_experiment(config[PLANNED]), has_identities=False)
    for path in config_paths:
        if Path(path).name == MANIFEST:  # Snakemake accepts it because it is JSON
            raise ConfigError(
                f"{shown_path(Path(path))}: is a target, and --configfile takes every word up to the next option for a "
                "config file; type the targets before --configfile"
            )
        read_yaml(shown_path(Path(path)))  # only for its errors: Snakemake keeps the last of two equal keys
    source = ", ".join(str(shown_path(Path(path))) for path in config_paths)
    return Plan(build_experiment(config, ConfigFiles(Path(config_paths[-1]), source)))


def the_config_file(plan: Plan, config_paths: list[str]) -> str:
    """Return the file that alone defines the plan's experiment, for a rule whose command reads it again.

    Raises: ConfigError if several files or `--config KEY=VALUE` define it.
    """
    path = Path(config_paths[-1])
    if build_graph(load_experiment(path)) != build_graph(plan.experiment):
        files = ", ".join(str(shown_path(Path(item))) for item in config_paths)
        raise ConfigError(f"{files}: not the whole configuration is in {shown_path(path)}; put it into one file")
    return str(path)


def _asked_by_snakemake(function: _FUNCTION) -> _FUNCTION:
    """Cache the function's signature, which Snakemake inspects several times for each job; this saves seconds."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


@dataclass
class RuleInputs:
    """Input functions for the rules of the stages.

    `ancient`: Snakemake's function. `forced`: the keys of jobs that are computed again although their results exist.
    Without `is_driver`, no job has inputs: Snakemake started this process for one job, when all its inputs existed.

    Inputs are ancient, so Snakemake ignores their times: fingerprints decide, and a copy or a checkout changes times.
    There are two exceptions. The result of a forced job is not ancient, so the jobs that depend on it run too. A result
    that must be checked again, for example because somebody deleted the manifest in the run directory, is not ancient
    either; its run directory is a further input of its own job, which therefore runs.
    """

    plan: Plan
    ancient: Callable[[str], str]
    is_driver: bool = True
    forced: set[str] = field(default_factory=set)

    @property
    def wildcard_constraints(self) -> dict[str, str]:
        """The patterns of all wildcards; names contain no slash, so that each path can be parsed in one way only."""
        names = dict.fromkeys(("data", "run", "phase", "evaluation", "peer", "hardware", "excerpt"), r"[A-Za-z0-9._-]+")
        digits = f"[0-9a-f]{{{FINGERPRINT_DIGITS}}}"
        return {"config": re.escape(self.plan.experiment.name), "fingerprint": digits, **names}

    def names(self, stage: str, *kinds: str, is_others: bool = False) -> str:
        """Return a wildcard constraint for jobs of these kinds: names of data, of evaluations or of trained runs.

        The kind of a training job is its task. The constraint assigns one rule to each path, although the kinds of a
        stage share a folder. Numbered jobs share one pattern, because Snakemake searches the constraint for every job,
        which takes seconds with thousands of names. `is_others`: return the constraint for jobs of all other kinds.
        """
        found = {
            node.name.split("/")[0 if stage == "train" else -1]
            for node in self.plan.nodes.values()
            if node.stage == stage and (node.config.get("kind", node.config.get("task")) in kinds) != is_others
        }
        patterns = {_NUMBER.sub("[0-9]+", re.escape(name)) for name in found}
        return "|".join(sorted(patterns)) or _NOTHING

    def node(self, stage: str, wildcards: Any) -> Node:
        """Return the node of a job. Raises: UnknownTarget for wildcards that no node has."""
        parts = [getattr(wildcards, wildcard) for wildcard in _NAME_WILDCARDS[stage]]
        return self.plan.find("/".join([stage, *parts]))

    def upstream(self, stage: str) -> Callable[[Any], list[str]]:
        """Return an input function that lists the manifests of a job's inputs.

        The job's run directory is a further input if the job must check its existing result.
        """

        @_asked_by_snakemake
        def manifests(wildcards: Any) -> list[str]:
            if not self.is_driver:
                return []
            node, plan = self.node(stage, wildcards), self.plan
            found = [self._marked(item) for item in plan.read_by(node)]
            return [*found, plan.run_dir(node).as_posix()] if plan.statuses[node.key].is_looked_at else found

        return manifests

    def _marked(self, node: Node) -> str:
        manifest = self.plan.manifest(node)
        is_made_now = node.key in self.forced or self.plan.statuses[node.key].is_looked_at
        return manifest if is_made_now else self.ancient(manifest)

    def preflight(self, stage: str, workflow: Any) -> Callable[[Any], list[str]]:
        """Return an input function that lists the preflight report of the rule's hardware class, if it has a class."""

        @_asked_by_snakemake
        def report(wildcards: Any) -> list[str]:
            if not self.is_driver:
                return []
            node = self.node(stage, wildcards)
            # A fresh job has no preflight as input. If the preflight's report did not exist yet, Snakemake would rerun
            # the job after making it, although the input is ancient.
            is_fresh = self.plan.statuses[node.key].state == "fresh" and node.key not in self.forced
            hardware = None if is_fresh else resource_of(workflow, rule_of(node), HARDWARE)
            return [self.ancient(f"{self.plan.root}/.preflight/{hardware}.json")] if hardware else []

        return report

    def conda_env(self, stage: str, workflow: Any) -> Callable[[Any], str | None]:
        """Return a function for `conda`, which returns the file in envs/ for the job's hardware class, or None."""

        @_asked_by_snakemake
        def environment(wildcards: Any) -> str | None:
            hardware = resource_of(workflow, rule_of(self.node(stage, wildcards)), HARDWARE)
            return str(path) if (path := ENVIRONMENTS_DIR / f"{hardware}.yaml").is_file() else None

        return environment

    def largest_checkpoint_bytes(self) -> int:
        """Return the bytes of the largest training state whose size is known."""
        sizes = [0]
        for node in self.plan.nodes.values():
            if node.stage == "train":
                with suppress(UncountedModel):
                    sizes.append(STATE_BYTES * num_parameters(node.config["model"]))
        return max(sizes)


def rule_of(node: Node) -> str:
    """Return the name of the rule that runs a training or evaluation job."""
    return f"{node.stage}_{node.config.get('kind', node.config.get('task'))}"
