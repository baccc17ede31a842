"""Define the user's settings: `--submitit-NAME VALUE` on the command line, `submitit-NAME: VALUE` in a profile."""

# `from __future__ import annotations` must not be here: Snakemake calls the annotations to parse the values.
# ruff: noqa: UP045  (Snakemake does not know `str | None`)
from dataclasses import dataclass, field
from typing import Any, Optional

from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase


def setting(default: Any, help_text: str, **further: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **further})


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    cluster: str = setting(
        "slurm", "Where jobs run: 'slurm', or 'local', as processes of this machine", choices=("slurm", "local")
    )
    # This is not a Path, because Snakemake's catalog of plugins writes the defaults as JSON.
    folder: str = setting(
        ".snakemake/submitit",
        "Folder for records and logs, on a file system that all nodes share; only its owner may write there",
    )
    partition: Optional[str] = setting(
        None,
        "Partition of jobs without the resource 'slurm_partition', or several, separated by commas: Slurm takes one "
        "that can run the job",
    )
    account: Optional[str] = setting(None, "Account of jobs without the resource 'slurm_account'")
    qos: Optional[str] = setting(None, "Quality of service of jobs without the resource 'qos'")
    reservation: Optional[str] = setting(None, "Reservation of jobs without the resource 'reservation'")
    jobname_prefix: str = setting("", "Prefix of the names of jobs in Slurm, before the rule and its wildcards")
    timeout_min: int = setting(60, "Time limit in minutes of jobs without the resource 'runtime'")
    extra: Optional[str] = setting(
        None,
        "More options of sbatch for every job, such as '--exclusive --reservation=week1'; the resource "
        "'slurm_extra' adds more",
    )
    array_size: int = setting(
        500, "Submit up to this many short jobs of one rule that are ready together as one job array; 0: no arrays"
    )
    array_runtime_min: int = setting(10, "Jobs with a time limit of at most this many minutes are short")
    extra_mem_mb: int = setting(
        0,
        "Memory to request in addition to the resource 'mem_mb', for the Snakemake within each job, which needs "
        "about 200 MB",
    )
    requeue_limit: int = setting(
        50,
        "How often a job starts again after preemptions and time limits; a job that twice in a row made no "
        "progress up to its time limit is stopped in any case",
    )
    no_requeue: bool = setting(
        False, "Do not let Slurm requeue jobs: after a preemption or time limit the driver submits a new job"
    )
    signal_delay_s: int = setting(
        120, "Seconds before its time limit at which a job gets SIGUSR2, to write a checkpoint and stop"
    )
    poll_interval_s: int = setting(30, "Seconds between two questions to Slurm, each about all jobs")
    lost_after_s: int = setting(600, "A job that Slurm has not known for this many seconds counts as lost")
    on_interrupt: str = setting(
        "cancel",
        "What Ctrl-C does with submitted jobs: 'cancel' them, or 'detach', so that the next start of Snakemake "
        "takes them over",
        choices=("cancel", "detach"),
    )
    keep_logs_days: int = setting(30, "Delete older jobs and logs at the end of the workflow; 0: keep everything")
