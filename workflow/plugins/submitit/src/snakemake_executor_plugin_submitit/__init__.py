"""Run Snakemake's jobs with submitit, on Slurm or on this machine."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load a name that Snakemake uses; job processes also import this package, but need not load the executor."""
    if name in ("Executor", "ExecutorSettings", "common_settings"):
        from snakemake_executor_plugin_submitit import executor

        return getattr(executor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
