"""What Slurm gave to a job, as far as starting processes in it needs to know."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from implicit_llm_workflow.launching.launch_errors import LaunchError, shown_slurm_variables


@dataclass(frozen=True)
class Allocation:
    """`cpus_per_node`: of the node with the fewest; None where Slurm does not say."""

    job_id: str
    num_nodes: int
    nodelist: str
    cpus_per_node: int | None

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Allocation | None:
        """The allocation in which this process runs; None outside of Slurm."""
        job_id = environment.get("SLURM_JOB_ID")
        if job_id is None:
            return None
        counts = [
            int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
        ]
        return cls(
            job_id,
            int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            environment.get("SLURM_JOB_NODELIST", ""),
            min(counts, default=None),
        )

    def first_node(self) -> str:
        """Raises: LaunchError."""
        try:
            done = subprocess.run(
                ["scontrol", "show", "hostnames", self.nodelist], capture_output=True, text=True, timeout=60, check=True
            )
            return done.stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"scontrol cannot name the nodes of this job ({error}); {shown_slurm_variables()}"
            ) from error


def require_nodes(nodes: int, allocation: Allocation | None) -> None:
    """Raises: LaunchError when a job of several nodes, or of several processes, has not got exactly these nodes."""
    if allocation is None:
        if nodes > 1:
            raise LaunchError(
                f"--nodes {nodes}: there is no Slurm allocation here; run the job through sbatch or salloc, or the "
                "workflow with a cluster profile"
            )
    elif allocation.num_nodes != nodes:
        raise LaunchError(
            f"--nodes {nodes}: the allocation has {allocation.num_nodes}; make them equal (resource 'nodes' of the "
            f"rule, --nodes of sbatch): {shown_slurm_variables()}"
        )
