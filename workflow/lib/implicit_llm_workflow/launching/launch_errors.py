"""What keeps several processes from training together, before any of them has begun."""

from __future__ import annotations

import os

from implicit_llm_contracts.runs.errors import UserError

_SHOWN = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_GPUS",
    "CUDA_VISIBLE_DEVICES",
)


class LaunchError(UserError):
    """The allocation or the environment is not what the job asked for."""

    failure_class = "env"


def shown_slurm_variables() -> str:
    """The variables that tell what Slurm gave, for messages."""
    found = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    return " ".join(found) or "no SLURM_* variables are set"
