"""Submit each job once: take over a job that an earlier or another driver submitted, instead of submitting it again.

This module pickles the step of each job (step.py) in submitit's format, and submitit runs the step on the node. After
sbatch has accepted a job, the job does not need its driver. Only the owner of the pickles' folder can enter it.
"""

import glob
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit import processes, store
from snakemake_executor_plugin_submitit.monitor import stop_all
from snakemake_executor_plugin_submitit.request import Job, has_all_outputs, with_changes
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import (
    UNKNOWN,
    NoAnswer,
    SlurmQueue,
    SlurmState,
    ask_slurm,
    find_by_name,
)
from snakemake_executor_plugin_submitit.step import MAIN, pickle_path
from snakemake_executor_plugin_submitit.store import CLASSES, End, JobFiles, Record, read_attempts

SBATCH_TIMEOUT_S = 120
LARGEST_ARRAY = 500  # during the submission, each of its jobs has an open lock file
# Texts of sbatch's messages if the controller is busy or unreachable and may accept the job later.
TRANSIENT = (
    "timed out", "unable to contact", "temporarily", "connection refused", "try again", "communication", "resending",
)  # fmt: skip
GPU = re.compile(r"\d+|(GPU|MIG)-.+")
REFUSED = End("user", "not submitted")
UNLIMITED = 10**6  # disables submitit's own limit of time-outs, because `step.decide` limits the requeues


class NotSubmitted(Exception):
    """The job was not submitted, or it is unknown whether Slurm accepted it; the message gives the reason."""


class Refused(NotSubmitted):
    """Slurm has refused the job, so it certainly does not run."""


@dataclass
class Dispatcher:
    """A dispatcher that takes over jobs of an earlier driver, or submits jobs.

    log: Snakemake's logger, whose messages the user sees; it ignores %-arguments, so messages must be complete. jobs:
    the jobs for which Snakemake waits, by the id() of Snakemake's job.
    """

    settings: ExecutorSettings
    folder: Path
    queue: SlurmQueue
    log: logging.Logger
    jobs: dict[int, Job] = field(default_factory=dict)

    def dispatch(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, str]]:
        """Take over or submit the jobs. Yields: each job, and "" or the reason why it was not submitted."""
        earlier = [(job.files, store.load(job.files)) for job in jobs]
        ids = [found.job_id for files, found in earlier if found and may_run_on_slurm(files, found)]
        known = self.queue.ask(ids) if ids else {}  # in one query
        for batch in batches(jobs, self.settings.array_size):
            yield from self._dispatch(batch, known)

    def _dispatch(self, batch: Sequence[Job], known: dict[str, SlurmState]) -> list[tuple[Job, str]]:
        """Take over some of the jobs and submit the others together; return each job as `dispatch` does.

        Locks exclude other drivers meanwhile.
        """
        done, rest = [], []
        with ExitStack() as locks:
            for job in sorted(batch, key=lambda job: job.files.path):
                try:
                    locks.enter_context(job.files.lock())
                    earlier = store.load(job.files)
                    if earlier is None and job.files.record.exists():
                        check_is_closed(job.files.record)
                    if earlier and earlier.is_open and self._is_adopted(job, earlier, known):
                        self.jobs[id(job.job)] = job
                        done.append((job, ""))
                        continue
                    if earlier and known.get(earlier.job_id, UNKNOWN).is_alive:  # it is cancelled, and still saves
                        job.waits_for = earlier.job_id
                    job.files.reset()
                except (NotSubmitted, NoAnswer) as error:
                    done.append((job, str(error)))
                    continue
                except OSError as error:
                    done.append((job, store.no_storage(job.files.path, error)))
                    continue
                job.record = self._new_record(job, earlier.number + 1 if earlier else 1)
                rest.append(job)
            try:
                self._start(rest)
                why = ""
            except NotSubmitted as error:
                why = str(error)
                for job in rest:
                    self.jobs.pop(id(job.job), None)
        return done + [(job, why) for job in rest]

    def submit_again(self, job: Job, kind: str, nodes: str) -> Job:
        """Submit a job that failed on `nodes` again; it resumes from its checkpoint.

        Raises: NotSubmitted; OSError if the job cannot be locked.
        """
        old, rule = job.record, CLASSES[kind]
        record = self._new_record(
            job,
            old.number + 1,
            excluded=old.excluded + ([nodes] if nodes and rule.is_elsewhere else []),
            memory=old.memory * rule.memory,
            retries={**old.retries, kind: old.retries.get(kind, 0) + 1},
        )
        another = Job(job.job, step=job.step, record=record, request=job.request)
        with job.files.lock():
            current = store.load(job.files)
            if current and current.number > old.number and current.job_id:  # another driver has submitted it again
                another.record = current
                self.jobs[id(job.job)] = another
            else:
                self._start([another], End(kind, "not submitted again"))
        return another

    def _is_adopted(self, job: Job, earlier: Record, known: dict[str, SlurmState]) -> bool:
        """Return whether the job takes over `earlier`, because this submission still runs or has made all outputs.

        `earlier` becomes the job's record in any case. If a local job has ended without recording how, the
        processes that it left behind are stopped.
        Raises: NotSubmitted if a job with other parameters still makes the outputs, or if one on another machine may;
        NoAnswer; OSError.
        """
        job.record = earlier
        job_id = earlier.job_id or self._find(job)  # the id is missing if its driver was killed, or got no answer
        if not job_id:
            return False
        job.save(job_id=job_id)
        found, end, has_same_key = job.record, job.end, earlier.key == job.step.record.key
        if end and end.failure_class is None:
            if not has_same_key or job.is_forced or not has_all_outputs(job.job):
                return False
            self.log.info(f"{found.rule}: job {found.job_id} has finished; its outputs are taken over")
            return True
        if end:
            self.log.info(f"{found.rule}: job {found.job_id} has failed ({end.failure_class}); submitted again")
            return False
        if not self._is_alive(job, known):
            if not found.is_on_slurm:
                stop_all([job])  # the job may have left processes behind
            return False
        if not has_same_key:
            cancel = "scancel" if found.is_on_slurm else "kill"
            raise NotSubmitted(
                f"job {found.job_id} still makes these outputs with other parameters; "
                f"wait for it or type `{cancel} {found.job_id}`, then start again"
            )
        self.log.info(f"{found.rule}: job {found.job_id} is pending or running; taken over")
        return True

    def _find(self, job: Job) -> str | None:
        """Find the id of a submission whose record lacks it; return None if neither attempts nor Slurm know it.

        Raises: NoAnswer.
        """
        found = job.record
        for attempt in read_attempts(job.files.attempts):
            if attempt["submission"] == found.number:
                return attempt["job_id"]
        job_id = find_by_name(found.name) if found.is_on_slurm else None
        return job_id if job_id is None or found.task is None else f"{job_id}_{found.task}"

    def _is_alive(self, job: Job, known: dict[str, SlurmState]) -> bool:
        found = job.record
        if found.is_on_slurm:
            return not (known if found.job_id in known else self.queue.ask([found.job_id]))[found.job_id].is_over
        if found.host != os.uname().nodename:
            message = f"process {found.job_id} on {found.host} may still make these outputs; start there, or wait"
            raise NotSubmitted(message)
        return processes.is_local_job_alive(job.files, found)

    def _new_record(self, job: Job, number: int, **changes: Any) -> Record:
        """Return the record of a new submission."""
        plain, folder = job.step.record, str(job.files.submission(number))
        name = store.slurm_name(self.settings.jobname_prefix, plain.rule, plain.wildcards)
        return replace(plain, name=name, number=number, folder=folder, submitted_unix_s=time.time(), **changes)

    def _start(self, jobs: Sequence[Job], if_refused: End = REFUSED) -> None:
        """Save the records, submit the jobs, and save the records with the ids.

        if_refused: the end to record, with Slurm's refusal, if Slurm refuses the jobs. Raises: NotSubmitted.
        """
        if not jobs:
            return
        first = jobs[0]
        if len(jobs) > 1:
            name = store.slurm_name(self.settings.jobname_prefix, first.record.rule)
            folder = str(self.folder / "arrays" / name)
            for task, job in enumerate(jobs):
                job.record = replace(job.record, name=name, folder=folder, task=task)
        gpus = [] if first.record.is_on_slurm else self._free_gpus(first)
        try:
            for job in jobs:
                job.save(gpus=gpus)
                self.jobs[id(job.job)] = job
            write_steps(jobs)
            command = sbatch_command(jobs) if first.record.is_on_slurm else []
        except OSError as error:
            raise NotSubmitted(store.no_storage(first.files.path, error)) from error
        started = None
        if first.record.is_on_slurm:
            try:
                main_id = submit_script(command, lambda: find_by_name(first.record.name))
            except Refused as error:
                self._record_end(jobs, if_refused._replace(message=f"{if_refused.message}: {error}"))
                raise
        else:
            first.process = start_locally(first)
            main_id, started = str(first.process.pid), processes.start_ticks(first.process.pid)
        for job in jobs:
            try:
                job.save(job_id=main_id if job.record.task is None else f"{main_id}_{job.record.task}", started=started)
            except OSError as error:  # the job runs nevertheless
                self.log.warning(
                    f"{store.no_storage(job.files.path, error)}; the next driver finds job {main_id} by name"
                )

    def _record_end(self, jobs: Sequence[Job], end: End) -> None:
        """Record that the jobs will not run; otherwise their records would look like those of jobs being submitted."""
        for job in jobs:
            try:
                store.write_json(job.files.outcome(job.record.number), end._asdict())
                job.save(is_open=False)
            except OSError as error:
                self.log.warning(f"{store.no_storage(job.files.path, error)}; its record stays open")

    def _free_gpus(self, job: Job) -> list[str]:
        """Return as many GPUs as the job requests, or all if this machine has fewer, by number or UUID.

        The GPUs are not used by other jobs of this driver if enough of them are free. Otherwise, warn and return the
        first of all GPUs, which jobs then share. If this machine lists no GPUs, the numbers count from 0.
        """
        count = job.record.requested["gpu"]
        others = [other for other in list(self.jobs.values()) if other.job is not job.job]
        listed = visible_gpus()
        every = [str(number) for number in range(count)] if listed is None else listed
        free = [gpu for gpu in every if not any(gpu in other.record.gpus for other in others)]
        if len(free) < count:
            why = "jobs share them" if every else "CUDA_VISIBLE_DEVICES names none"
            self.log.warning(f"{count} GPUs requested, {len(free)} of this machine are free; {why}")
            free = every
        return free[:count]


def may_run_on_slurm(files: JobFiles, record: Record) -> bool:
    """Return whether the submission may run on Slurm; a cancelled job still saves when its driver has ended."""
    end = files.end(record.number)
    is_cancelled = end is not None and end.failure_class == "cancelled"
    return record.is_on_slurm and record.job_id != "" and (record.is_open or is_cancelled)


def check_is_closed(record: Path) -> None:
    """Check that an unreadable record, maybe of another version of this plugin, is not open. Raises: NotSubmitted."""
    if store.read_json(record).get("is_open", True):
        raise NotSubmitted(
            f"{record}: this version cannot read it, and its job may still run; "
            "when no job makes these outputs any more, delete it, then start again"
        )


def batches(jobs: Sequence[Job], array_size: int) -> list[list[Job]]:
    """Return groups of jobs to submit together: small jobs of one rule and request, or a single job.

    A group has at most `array_size` jobs, and never more than LARGEST_ARRAY.
    """
    groups: dict[str, list[Job]] = {}
    for index, job in enumerate(jobs):
        key = store.digest([job.record.rule, job.request] if job.is_small else index)
        groups.setdefault(key, []).append(job)
    size = max(1, min(array_size, LARGEST_ARRAY))
    return [group[first : first + size] for group in groups.values() for first in range(0, len(group), size)]


def visible_gpus() -> list[str] | None:
    """Return the GPUs that CUDA would use, by number or UUID; None if this machine lists none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:  # CUDA ignores everything after the first invalid name, such as -1
        return list(takewhile(GPU.fullmatch, map(str.strip, named.split(","))))
    return sorted((path.removeprefix("/dev/nvidia") for path in glob.glob("/dev/nvidia[0-9]*")), key=int) or None


def write_steps(jobs: Sequence[Job]) -> None:
    """Pickle the steps for `step.main`, before the jobs can start and without their ids, which submitit would need.

    Raises: OSError.
    """
    from submitit.core.utils import DelayedSubmission

    folder = Path(jobs[0].record.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for task, job in enumerate(jobs):
        delayed = DelayedSubmission(replace(job.step, record=job.record))
        delayed.set_timeout(job.record.requested["runtime"], UNLIMITED)
        delayed.dump(pickle_path(folder, task))


def step_command(record: Record) -> list[str]:
    return [sys.executable, "-u", "-c", MAIN, record.folder]


def start_locally(job: Job) -> subprocess.Popen[bytes]:
    """Start submitit's controller for the step that `write_steps` has pickled.

    This replaces submitit's `start_controller`, whose process would be in the driver's session. Ctrl-C in a terminal
    would kill it, although the driver decides whether jobs are cancelled or continue.
    """
    variables = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": shlex.join(step_command(job.record)),
        "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * job.record.requested["runtime"]),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(job.step.signal_delay_s)),
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
        "SUBMITIT_STDERR_TO_STDOUT": "",
        "CUDA_VISIBLE_DEVICES": ",".join(job.record.gpus),
    }
    command = [sys.executable, "-m", "submitit.local._local", job.record.folder]
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


def sbatch_command(jobs: Sequence[Job]) -> list[str]:
    """Write the script for sbatch, and return the command with the options of the first job.

    The folder of the first job has all steps; several steps form an array. The options are on the command line, because
    only there do they override the user's SBATCH_* variables; the script repeats the command as a comment. Our process
    replaces the batch script, so it gets the signals, and Slurm's controller need not create a step. If the option
    `signal` is not for the batch script (B:), srun starts our process. Raises: OSError.
    """
    from submitit.core.utils import JobPaths

    request, record, is_array = jobs[0].request, jobs[0].record, len(jobs) > 1
    folder = Path(record.folder)
    paths = JobPaths(folder, "%A_%a" if is_array else "%j", task_id=0)
    options = {
        "comment": record.rule if is_array else f"{record.rule}:{record.wildcards}"[:200],
        "export": "ALL",
        **with_changes(request, record.excluded, record.memory),
        **{"job-name": record.name, "output": paths.stdout, "error": paths.stderr, "open-mode": "append"},
    }
    if earlier := [job.waits_for for job in jobs if job.waits_for]:
        mine = options.get("dependency")  # of slurm_extra
        options["dependency"] = f"{f'{mine},' if mine else ''}afterany:{':'.join(earlier)}"
    if is_array:
        options["array"] = f"0-{len(jobs) - 1}"
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in sorted(options.items())]
    srun = f"srun --nodes=1 --ntasks=1 --cpus-per-task={request['cpus-per-task']} --overlap --unbuffered".split()
    is_batch = str(request["signal"]).startswith("B:")
    command = ["exec", *([] if is_batch else srun), *step_command(record)]
    script = folder / "submission.sh"
    asked = ["sbatch", "--parsable", *words, str(script)]
    lines = ["#!/bin/bash", *(f"# {line}" for line in shlex.join(asked).splitlines())]
    lines += ["trap '' USR2", "export SUBMITIT_EXECUTOR=slurm", shlex.join(command), ""]
    script.write_text("\n".join(lines), encoding="utf-8")
    return asked


def submit_script(
    command: Sequence[str], find: Callable[[], str | None], pauses_s: Sequence[float] = (2, 5, 15, 60, 120)
) -> str:
    """Submit a script once, by this sbatch command.

    `find` searches for the job by its name, because sbatch may report an error although it accepted the job. After
    `find` has raised NoAnswer, sbatch is called again only when a later `find` returns None.
    Returns: the job's id. Raises: Refused, or NotSubmitted if it is unknown whether Slurm accepted the job.
    """
    refusal, doubt = "", ""
    for pause_s in (*pauses_s, 0):
        try:
            if not doubt:
                return sbatch(command)
        except NoAnswer as error:
            refusal = str(error)
        try:
            if found := find():
                return found
            doubt = ""
        except NoAnswer as error:
            doubt = f"; whether the job was accepted is unknown ({error})"
        if not doubt and not any(text in refusal.lower() for text in TRANSIENT):
            break
        time.sleep(pause_s)
    raise NotSubmitted(refusal + doubt) if doubt else Refused(refusal)


def sbatch(command: Sequence[str]) -> str:
    """Run sbatch and return the job's id. Raises: NoAnswer."""
    answer = ask_slurm(command, SBATCH_TIMEOUT_S)
    job_id = answer.strip().rpartition("\n")[2].partition(";")[0]
    if not job_id.isdigit():
        raise NoAnswer(f"sbatch printed no job id: {answer}")
    return job_id
