"""What the executor plugin knows of the jobs of a plan: its records of what it submitted, and what Slurm says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.freed import PAGES
from implicit_llm_workflow.planning.plan import RESULTS, Plan

if TYPE_CHECKING:
    from snakemake_executor_plugin_submitit.records import Submitted


def submitted_jobs(plan: Plan, nodes: Iterable[Node], folder: Path | None = None) -> dict[str, Submitted]:
    """By key, those of the nodes that were ever submitted. Slurm is asked once, and only if something may still run."""
    from snakemake_executor_plugin_submitit import records

    home = plan.root.parent.parent.absolute()
    keys = {node.key: records.job_key(home / output for output in outputs_of(plan, node)) for node in nodes}
    found = records.read_jobs(folder or home / records.DEFAULT_FOLDER, set(keys.values()))
    return {key: found[job] for key, job in keys.items() if job in found}


def outputs_of(plan: Plan, node: Node) -> list[str]:
    """What the node's rule declares, below the working directory of Snakemake: by it the executor knows a job again."""
    run_dir = RESULTS / plan.experiment.name / node.key
    names = ["manifest.json"]
    if node.stage in PAGES:
        names += ["index.html", "claims.json"]
    if node.stage == "report":
        names += ["numbers.tex", "lineage.svg"]
        names += [f"tables/{table}.{form}" for table in plan.tables for form in ("csv", "tex")]
        names += [f"figures/{figure}.svg" for figure in plan.figures]
    return [(run_dir / name).as_posix() for name in names]
