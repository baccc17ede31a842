"""Run Snakemake's jobs with submitit, on Slurm or on this machine.

Snakemake imports this package at every start, also within each job: submitit itself is imported where it is used.
"""

from snakemake_interface_executor_plugins.settings import CommonSettings

from snakemake_executor_plugin_submitit.executor import Executor
from snakemake_executor_plugin_submitit.settings import ExecutorSettings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=False,  # jobs inherit the environment; in a command it would be readable by others
    auto_deploy_default_storage_provider=False,  # it would call pip before every job
    init_seconds_before_status_checks=1,
)
