"""Submitting each job once: what an earlier or another driver submitted is taken over, not submitted again."""

from __future__ import annotations

import glob
import logging
import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from snakemake_executor_plugin_submitit import attempts, processes, record
from snakemake_executor_plugin_submitit.failure import MORE_MEMORY, is_provisional
from snakemake_executor_plugin_submitit.job_files import JobFiles, read_json
from snakemake_executor_plugin_submitit.monitor import Tracked, stop_all
from snakemake_executor_plugin_submitit.parameters import signal_delay_s, with_changes
from snakemake_executor_plugin_submitit.prepared import Prepared, has_all_outputs
from snakemake_executor_plugin_submitit.record import Record
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm_queue import NoAnswer, SlurmQueue, SlurmState, find_by_name


class Busy(Exception):
    """Another job is still making the same outputs, with other parameters or where it cannot be seen."""


@dataclass(frozen=True)
class Known:
    """What Slurm says of the jobs on record; `is_answered`: False when it could not be asked."""

    states: dict[str, SlurmState]
    is_answered: bool


class Dispatcher:
    """`log`: of Snakemake, so that its user sees what was taken over; it shows messages without their arguments."""

    def __init__(self, settings: ExecutorSettings, folder: Path, queue: SlurmQueue, log: logging.Logger) -> None:
        self.log = log
        self.settings = settings
        self.folder = folder
        self.queue = queue
        self.gpus_in_use: set[int] = set()

    def known(self, jobs: Sequence[Prepared]) -> Known:
        """What Slurm knows of earlier submissions of these jobs, in one question."""
        earlier = [record.load(job.files) for job in jobs]
        ids = [found.job_id for found in earlier if found and found.job_id and found.is_open]
        if not ids or self.settings.cluster != "slurm":
            return Known({}, True)
        try:
            return Known(self.queue.ask(ids), True)
        except NoAnswer:
            return Known({}, False)

    def dispatch(self, batch: Sequence[Prepared], known: Known) -> tuple[list[Tracked], list[tuple[Prepared, str]]]:
        """Take over or submit the jobs, the latter together. Returns: the jobs, and those that failed with the reason.

        Another driver cannot decide on the same jobs meanwhile.
        """
        from snakemake_executor_plugin_submitit.submission import SubmissionError

        tracked, failed, rest = [], [], []
        with ExitStack() as locks:
            for job in sorted(batch, key=lambda job: job.files.path):
                locks.enter_context(job.files.lock())
                try:
                    adopted = self._adopt(job, known)
                except (Busy, NoAnswer) as error:
                    failed.append((job, str(error)))
                    continue
                if adopted is None:
                    rest.append(job)
                else:
                    tracked.append(adopted)
            if rest:
                try:
                    tracked += self._submit(rest)
                except SubmissionError as error:
                    failed += [(job, str(error)) for job in rest]
        return tracked, failed

    def submit_again(self, job: Tracked, kind: str, nodes: Sequence[str]) -> Tracked:
        """Submit a job that failed once more, as the continuation of what it did. Raises: SubmissionError."""
        old, prepared = job.record, job.prepared
        retries = {**old.retries, kind: old.retries.get(kind, 0) + 1}
        memory = old.memory * (MORE_MEMORY if kind == "oom" else 1.0)
        self.gpus_in_use.difference_update(old.gpus)
        with job.files.lock():
            new = self._new_record(prepared, old.number + 1).changed(
                excluded=tuple(dict.fromkeys([*old.excluded, *nodes])), memory=memory, retries=retries
            )
            return self._start([prepared], [new])[0]

    def _adopt(self, job: Prepared, known: Known) -> Tracked | None:
        """The job as it was submitted before, if that is still worth something. Raises: Busy, NoAnswer."""
        found = record.load(job.files)
        if found is None or not found.is_open:
            return None
        if found.cluster != self.settings.cluster and found.cluster == "debug":
            return None
        if not found.job_id:
            found = self._find(job.files, found)
            if found is None:
                return None
        outcome = read_json(job.files.outcome(found.number))
        if outcome.get("failure_class", "") is None:
            if found.key == job.key and not job.is_forced and has_all_outputs(job.job):
                self.log.info(f"{job.rule}: job {found.job_id} has finished meanwhile; its outputs are taken over")
                return self._tracked(job, found)
            return None
        if outcome and not is_provisional(outcome):
            self.log.info(f"{job.rule}: job {found.job_id} has failed ({outcome['failure_class']}); submitted anew")
            return None
        if not self._is_alive(job.files, found, known):
            if found.cluster == "local":
                stop_all([self._tracked(job, found)])  # what it started may have outlived it
            return None
        if found.key != job.key:
            raise Busy(
                f"job {found.job_id} still makes these outputs with other parameters; "
                f"wait for it or type `{_cancel_command(found)}`, then start again"
            )
        self.log.info(f"{job.rule}: job {found.job_id} is still there; taken over")
        return self._tracked(job, found)

    def _find(self, files: JobFiles, found: Record) -> Record | None:
        """The record with the id of a job whose driver died while it submitted, or None if there is no such job."""
        job_id: str | None = None
        if found.cluster == "slurm":
            job_id = find_by_name(found.name, found.submitted_unix_s)
            if job_id is not None and found.task is not None:
                job_id = f"{job_id}_{found.task}"
        elif files.is_running_here():
            job_id = next((s["job_id"] for s in reversed(attempts.starts(files.attempts))), None)
        if not job_id:
            return None
        found = found.changed(job_id=job_id, state=record.SUBMITTED)
        record.save(files, found)
        return found

    def _is_alive(self, files: JobFiles, found: Record, known: Known) -> bool:
        if found.cluster == "slurm":
            state = known.states.get(found.job_id)
            if state is None and found.job_id not in known.states:
                state = self._ask_once(found.job_id)
            return state is None or not state.is_ended
        if found.host != os.uname().nodename:
            raise Busy(f"process {found.job_id} on {found.host} may still make these outputs; start there, or wait")
        return processes.is_alive(int(found.job_id), found.started) or files.is_running_here()

    def _ask_once(self, job_id: str) -> SlurmState | None:
        """None: Slurm cannot be asked, so the job may run. A job that Slurm has forgotten has ended."""
        try:
            return self.queue.ask([job_id]).get(job_id, SlurmState("COMPLETED"))
        except NoAnswer:
            return None

    def _submit(self, jobs: Sequence[Prepared]) -> list[Tracked]:
        records = []
        for job in jobs:
            earlier = record.load(job.files)
            job.files.start_afresh()
            records.append(self._new_record(job, earlier.number + 1 if earlier else 1))
        return self._start(jobs, records)

    def _new_record(self, job: Prepared, number: int) -> Record:
        return Record(
            job.key,
            record.slurm_name(self.settings.jobname_prefix, job.rule, job.wildcards),
            number,
            self.settings.cluster,
            str(job.files.submission(number)),
            rule=job.rule,
            wildcards=job.wildcards,
            requested=job.requested,
            logs=tuple(os.path.abspath(log) for log in job.job.log or ()),
        )

    def _start(self, jobs: Sequence[Prepared], records: Sequence[Record]) -> list[Tracked]:
        """Write down what will be submitted, submit it, write down what it became. Raises: SubmissionError."""
        from snakemake_executor_plugin_submitit import submission

        first = records[0]
        folder = Path(first.folder)
        if len(jobs) > 1:
            folder = submission.unique_folder(self.folder / "arrays")
            name = record.slurm_name(self.settings.jobname_prefix, jobs[0].rule)
            records = [found.changed(folder=str(folder), name=name, task=task) for task, found in enumerate(records)]
        if self.settings.cluster == "local":
            records = [found.changed(gpus=self._take_gpus(job.gpus)) for job, found in zip(jobs, records, strict=True)]
        for job, found in zip(jobs, records, strict=True):
            record.save(job.files, found)
        steps = [job.step(found.number, self.settings) for job, found in zip(jobs, records, strict=True)]
        submission.write_steps(folder, steps, jobs[0].limit_min)
        submitted = self._call(folder, jobs, records)
        tracked = []
        for job, found in zip(jobs, records, strict=True):
            job_id = submitted.job_id if found.task is None else f"{submitted.job_id}_{found.task}"
            found = found.changed(job_id=job_id, started=submitted.started, state=record.SUBMITTED)
            record.save(job.files, found)
            tracked.append(self._tracked(job, found, submitted.process))
        return tracked

    def _call(self, folder: Path, jobs: Sequence[Prepared], records: Sequence[Record]) -> Any:
        from snakemake_executor_plugin_submitit import submission

        first = records[0]
        if self.settings.cluster == "local":
            delay_s = signal_delay_s(jobs[0].limit_min, self.settings)
            return submission.submit_locally(folder, jobs[0].limit_min, delay_s, first.gpus)
        request = {**with_changes(jobs[0].request, first.excluded, first.memory), "job-name": first.name}
        if len(jobs) > 1:
            request["comment"] = jobs[0].rule
        submission.write_script(folder, request, len(jobs))
        return submission.submit_to_slurm(folder, lambda: find_by_name(first.name, first.submitted_unix_s))

    def _take_gpus(self, count: int) -> tuple[int, ...]:
        """GPUs of this machine that no other job has; shared ones when there are not enough."""
        every = visible_gpus() or list(range(count))
        free = [gpu for gpu in every if gpu not in self.gpus_in_use]
        if len(free) < count:
            self.log.warning(f"{count} GPUs wanted, {len(free)} of this machine are free; they are shared")
            free = every
        taken = tuple(free[:count])
        self.gpus_in_use.update(taken)
        return taken

    def _tracked(self, job: Prepared, found: Record, process: subprocess.Popen[bytes] | None = None) -> Tracked:
        info = SubmittedJobInfo(job=job.job, external_jobid=found.job_id)
        self.gpus_in_use.update(found.gpus)
        return Tracked(info=info, prepared=job, record=found, process=process)


def visible_gpus() -> list[int]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [int(word) for word in named.split(",") if word.strip().isdigit()]
    return sorted(
        int(match[1]) for path in glob.glob("/dev/nvidia*") if (match := re.fullmatch(r".*nvidia(\d+)", path))
    )


def _cancel_command(found: Record) -> str:
    return f"scancel {found.job_id}" if found.cluster == "slurm" else f"kill {found.job_id}"
