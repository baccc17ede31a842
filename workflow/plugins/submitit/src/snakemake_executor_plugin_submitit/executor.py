"""Execute Snakemake's jobs: submit them, watch them, and report how they ended."""

import shutil
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.real import RealExecutor
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings
from snakemake_interface_executor_plugins.utils import format_cli_arg, join_cli_args

from snakemake_executor_plugin_submitit import slurm, store
from snakemake_executor_plugin_submitit.monitor import Monitor, is_worth_another, message, recorded, stop_all
from snakemake_executor_plugin_submitit.request import (
    NO_LIMITS,
    Job,
    members,
    not_understood,
    prepare,
    requested,
    sbatch_request,
)
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import PLACE, NoAnswer, SlurmQueue, check_place, signals_steps_first
from snakemake_executor_plugin_submitit.store import End
from snakemake_executor_plugin_submitit.submission import Dispatcher

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=False,  # jobs inherit the variables; a command line would show them to other users
    auto_deploy_default_storage_provider=False,  # it would call pip before every job
    init_seconds_before_status_checks=1,
)
# The driver submits each attempt of a rule with its own resources, so the Snakemake inside a job must not retry. Only
# this option overrides the `retries` of a rule, and a job has no other use for it.
ONE_ATTEMPT = "--preemptible-rules --preemptible-retries 0"
NO_RATE_LIMIT = "--max-jobs-per-timespan 1000/0s"  # else the limit's timer delays Snakemake's end by a second
CANCELLED = End("cancelled", "cancelled with its workflow")
LOOKS_PER_S = 50  # jobs whose files are checked in a second, on a shared file system
SHORTEST_ROUND_S = 0.2


class Executor(RemoteExecutor):
    def __post_init__(self) -> None:
        self.settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        try:
            self.folder = store.private_folder(Path(self.settings.folder))
        except OSError as error:
            raise WorkflowError(f"--submitit-folder: {error}") from error
        self.is_on_slurm = self.settings.cluster == "slurm"
        if self.is_on_slurm and not shutil.which("sbatch"):
            raise WorkflowError("sbatch is not on PATH; start on a login node, or give --submitit-cluster local")
        if self.is_on_slurm and (ignored := slurm.ignored_variables()):
            self.logger.warning(
                f"{', '.join(ignored)} have no effect on jobs; give an option --submitit-... or a resource"
            )
        self.needs_srun, self.limits = False, NO_LIMITS
        self._knows_site = not self.is_on_slurm
        self._ask_of_site()
        self._check_rules()
        queue = SlurmQueue(self.settings.poll_interval_s, self.logger)
        self.dispatcher = Dispatcher(self.settings, self.folder, queue, self.logger)
        self.monitor = Monitor(queue, self.settings.lost_after_s)
        self._reported: dict[int, Job] = {}  # by the id() of Snakemake's job, which has not saved yet how it ended
        self._has_ended_jobs = False
        self.next_seconds_between_status_checks = SHORTEST_ROUND_S

    # Snakemake's scheduler calls these methods.

    def run_jobs(self, jobs: list[Any]) -> None:
        self._ask_of_site()
        prepared = []
        for job in jobs:
            self.run_job_pre(job)
            command = self.format_job_exec(job)
            is_forced = any(self.dag.reason(member).forced for member in members(job))
            try:
                given = (command, self.folder, self.settings, is_forced, self.needs_srun, self.limits)
                prepared.append(prepare(job, *given))
            except WorkflowError as error:
                self.report_job_error(SubmittedJobInfo(job=job), msg=f"not submitted: rule {job.name}: {error}. ")
        for started, why in self.dispatcher.dispatch(prepared):
            if why:
                self.report_job_error(started, msg=f"not submitted: {why}. ")
            else:
                self.report_job_submission(started)
                self.logger.info(f"Job {started.job.jobid} is {whereabouts(started)}.")

    def run_job(self, job: Any) -> None:
        self.run_jobs([job])

    def get_job_args(self, job: Any, **kwargs: Any) -> str:
        # RemoteExecutor's method makes the job wait for a temporary folder, which this process deletes when it ends.
        wait_for = format_cli_arg("--wait-for-files", list(job.get_wait_for_files()))
        return join_cli_args([RealExecutor.get_job_args(self, job, **kwargs), wait_for, ONE_ATTEMPT, NO_RATE_LIMIT])

    def additional_general_args(self) -> str:
        return ""

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        # `active_jobs` is empty while Snakemake checks the jobs. A job without an id is not yet known to be submitted.
        jobs = [job for job in list(self.dispatcher.jobs.values()) if job.record.job_id]
        if not jobs:
            return
        self._has_ended_jobs = True
        if self.settings.on_interrupt == "detach":
            self.logger.info(f"{len(jobs)} jobs continue without Snakemake; its next start takes them over.")
            return
        self.wait = False  # else the waiting thread could submit a stopped job again
        on_slurm = [job for job in jobs if job.record.is_on_slurm]
        local = [job for job in jobs if not job.record.is_on_slurm]
        try:
            if on_slurm:
                slurm.ask_slurm(["scancel", *sorted({job.record.job_id for job in on_slurm})])
        except NoAnswer as error:
            self.logger.warning(f"{error}; the jobs may still run, and the next start of Snakemake takes them over")
            on_slurm = []
        stop_all(local)
        for job in on_slurm + local:
            if job.end is None:  # the next driver takes over a job that has just finished
                recorded(job, CANCELLED)
                self._close(job)

    def handle_job_success(self, job: Any) -> None:
        """Close the record of a job of Snakemake, which has just saved how the job ended.

        Until then the record is open: if Snakemake is killed, the next driver must find the finished job.
        """
        if reported := self._reported.pop(id(job), None):  # None: the job was not submitted
            self._close(reported)

    handle_job_error = handle_job_success

    def shutdown(self) -> None:
        super().shutdown()
        if self._has_ended_jobs:
            try:
                store.clean(self.folder, self.settings.keep_logs_days)
            except OSError as error:  # such as another driver that deletes the same files
                self.logger.warning(f"Not all old logs were deleted: {error}")

    # Snakemake's waiting thread calls these methods.

    async def check_active_jobs(self, active_jobs: list[Job]) -> AsyncGenerator[Job, None]:
        if not active_jobs:  # Snakemake may call this before __post_init__ has finished
            return
        self.next_seconds_between_status_checks = max(SHORTEST_ROUND_S, len(active_jobs) / LOOKS_PER_S)
        try:
            ends = self.monitor.look(active_jobs)
        except Exception as error:  # an exception here would make Snakemake wait for ever
            self.logger.warning(f"The jobs could not be checked; next try soon: {error!r}")
            ends = [None] * len(active_jobs)
        for job, end in zip(active_jobs, ends, strict=True):
            if end is None or not self.wait:
                yield job
                continue
            if another := self._submitted_again(job, end):
                yield another
                continue
            self._reported[id(job.job)] = self.dispatcher.jobs.pop(id(job.job))
            self._has_ended_jobs = True
            if end.failure_class is None:
                self.report_job_success(job)
            else:
                self.report_job_error(job, msg=f"{message(job, end)}\n", aux_logs=[str(job.files.output_log)])

    def _submitted_again(self, job: Job, end: End) -> Job | None:
        """Submit a failed job again if its failure class allows it; return the new submission, or None without one."""
        if end.failure_class is None:
            return None
        if not job.record.is_on_slurm:
            stop_all([job])  # the job may have left processes behind
        try:
            if not is_worth_another(job, end.failure_class, self.settings.requeue_limit):
                return None
            another = self.dispatcher.submit_again(job, end.failure_class, end.nodes)
        except Exception as error:
            self.logger.warning(f"Job {job.job.jobid} could not be submitted again: {error}")
            return None
        self.logger.warning(f"{message(job, end)}\nSubmitted again: {whereabouts(another)}.")
        return another

    def _check_rules(self) -> None:
        """Check the resources of one job of each rule, and on Slurm its partition, account, qos and constraint.

        Warn of resources that nothing uses and of time limits that are too long. Raises: WorkflowError.
        """
        checked = set()
        jobs = {job.rule.name: job for job in self.dag.needrun_jobs() if not job.is_local}
        for rule, job in sorted(jobs.items()):
            try:
                resources = job.resources
            except Exception:  # noqa: S112  resources may depend on files that do not exist yet
                continue
            readers = [job.rule.shellcmd, *job.rule.input, *job.rule.params]
            try:
                for name in not_understood(resources.keys(), readers, list(self.workflow.global_resources)):
                    self.logger.warning(f"rule {rule}: nothing uses resource {name}; pass it to the rule's command")
                if self.is_on_slurm:
                    try:
                        request = sbatch_request(resources, job.threads, self.settings, self.limits)
                    except WorkflowError:
                        if self.workflow.execution_settings.keep_going:
                            continue  # jobs with this request fail individually when they are submitted
                        raise
                    self._warn_of_time_limit(rule, resources)
                    place = tuple(request.get(name) for name in PLACE)
                    if place not in checked:
                        check_place(request)
                        checked.add(place)
            except WorkflowError as error:
                raise WorkflowError(f"rule {rule}: {error}") from error

    def _ask_of_site(self) -> None:
        """Query the properties of the cluster, unless Slurm has answered already; warn if the query fails."""
        if self._knows_site:
            return
        try:
            self.needs_srun, self.limits = signals_steps_first(), slurm.time_limits()
            self._knows_site = True
        except NoAnswer as error:
            self.logger.warning(f"{error}; the time limits of partitions are asked for again before the next jobs")

    def _warn_of_time_limit(self, rule: str, resources: Mapping[str, Any]) -> None:
        """Warn if the rule requests more time than its partition allows; its jobs then get the partition's limit."""
        wanted, allowed = (requested(resources, 1, self.settings, one)["runtime"] for one in ({}, self.limits))
        if allowed < wanted:
            self.logger.warning(
                f"rule {rule}: runtime={wanted} is longer than its partition allows; its jobs get {allowed} minutes"
            )

    def _close(self, job: Job) -> None:
        """Close the job's record unless there is a later submission; warn if a file cannot be read or written.

        A record that stays open is harmless, because the next driver sees that its job has ended.
        """
        try:
            with job.files.lock():
                current = store.load(job.files)
                if current and current.number == job.record.number:  # no later submission
                    job.save(is_open=False)
        except OSError as error:
            self.logger.warning(f"{store.no_storage(job.files.path, error)}; its record stays open")


def whereabouts(job: Job) -> str:
    return f"{'Slurm job' if job.record.is_on_slurm else 'process'} {job.record.job_id} (log: {job.files.output_log})"
