"""What a user can set: `--submitit-NAME VALUE` on the command line, `submitit-NAME: VALUE` in a profile."""

# No `from __future__ import annotations` here: Snakemake calls the annotations to parse the values.
# ruff: noqa: UP045  (nor does it know `str | None`)
from dataclasses import dataclass, field
from typing import Optional

from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase

CLUSTERS = ("slurm", "local", "debug")
ON_INTERRUPT = ("cancel", "detach")
KEEP_LOGS = ("all", "failed")


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    cluster: str = field(
        default="slurm",
        metadata={
            "help": "Where jobs run: 'slurm'; 'local', as processes of this machine; 'debug', one after the other in "
            "the foreground, with their output on the terminal",
            "choices": CLUSTERS,
        },
    )
    folder: str = field(  # not a Path: Snakemake's catalog of plugins writes the defaults as JSON
        default=".snakemake/submitit",
        metadata={
            "help": "Folder for records and logs, on a file system that all nodes share; only its owner may write there"
        },
    )
    partition: Optional[str] = field(
        default=None, metadata={"help": "Partition of jobs without the resource 'slurm_partition'"}
    )
    partition_table: Optional[str] = field(
        default=None,
        metadata={
            "help": "YAML file with the partitions to choose from, and their limits, for jobs that name none; "
            "without it the partitions that Slurm reports"
        },
    )
    account: Optional[str] = field(
        default=None, metadata={"help": "Account of jobs without the resource 'slurm_account'"}
    )
    qos: Optional[str] = field(default=None, metadata={"help": "Quality of service of jobs without the resource 'qos'"})
    reservation: Optional[str] = field(
        default=None, metadata={"help": "Reservation of jobs without the resource 'reservation'"}
    )
    jobname_prefix: str = field(
        default="", metadata={"help": "Prefix of the names of jobs in Slurm, before the rule and its wildcards"}
    )
    timeout_min: int = field(
        default=60, metadata={"help": "Time limit in minutes of jobs without the resource 'runtime'"}
    )
    extra: Optional[str] = field(
        default=None,
        metadata={
            "help": "More options of sbatch for every job, such as '--exclusive --reservation=week1'; "
            "the resource 'slurm_extra' adds more"
        },
    )
    array_size: int = field(
        default=500,
        metadata={
            "help": "Submit up to this many short jobs of one rule that are ready together as one job array; "
            "0: no arrays"
        },
    )
    array_runtime_min: int = field(
        default=10, metadata={"help": "Jobs with a time limit of at most this many minutes are short"}
    )
    extra_mem_mb: int = field(
        default=0,
        metadata={
            "help": "Memory to request in addition to the resource 'mem_mb', for the Snakemake within each job, "
            "which needs about 200 MB"
        },
    )
    requeue_limit: int = field(
        default=50,
        metadata={
            "help": "How often a job starts again after preemptions and time limits; a job that twice in a row made "
            "no progress up to its time limit is stopped in any case"
        },
    )
    no_requeue: bool = field(
        default=False,
        metadata={
            "help": "Do not let Slurm requeue jobs: after a preemption or time limit the driver submits a new job"
        },
    )
    signal_delay_s: int = field(
        default=120,
        metadata={"help": "Seconds before its time limit at which a job gets SIGUSR2, to write a checkpoint and stop"},
    )
    poll_interval_s: int = field(
        default=30,
        metadata={"help": "Seconds between two questions to Slurm, each about all jobs"},
    )
    lost_after_s: int = field(
        default=600,
        metadata={"help": "A job that Slurm has not known for this many seconds counts as lost"},
    )
    on_interrupt: str = field(
        default="cancel",
        metadata={
            "help": "What Ctrl-C does with submitted jobs: 'cancel' them, or 'detach', so that the next start of "
            "Snakemake takes them over",
            "choices": ON_INTERRUPT,
        },
    )
    notify_command: Optional[str] = field(
        default=None,
        metadata={
            "help": "Shell command to run when the workflow has ended, failed or stalled, with SUBMITIT_EVENT (done, "
            "failed, stalled) and SUBMITIT_TEXT in its environment, and the message as JSON on its standard input"
        },
    )
    notify_url: Optional[str] = field(
        default=None,
        metadata={"help": "Webhook that gets the same JSON as a POST; its URL does not appear in any log"},
    )
    stalled_after_min: int = field(
        default=60,
        metadata={
            "help": "A workflow has stalled if no job started, ended, printed or made progress for this many minutes; "
            "0: never"
        },
    )
    efficiency_report: bool = field(
        default=False,
        metadata={"help": "Show at the end of the workflow what the jobs used and requested"},
    )
    keep_logs: str = field(
        default="all",
        metadata={
            "help": "Keep the logs of 'all' jobs, or only of 'failed' ones: those of successful jobs are deleted at "
            "the end of the workflow",
            "choices": KEEP_LOGS,
        },
    )
    keep_logs_days: int = field(
        default=30, metadata={"help": "Delete older jobs and logs at the end of the workflow; 0: keep everything"}
    )
