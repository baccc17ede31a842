"""Add to Snakemake a lock that ends with its process, help with targets, and readable names that show the results.

Snakemake decides which jobs run: those whose declared manifest is missing or older than an input. The declared path of
an output is in the work folder of the wanted result; its readable path, in the run directory, is that of the copy for
people. The driver also describes this invocation of Snakemake in the environment of the jobs, which log it to MLflow.
"""

import argparse
import atexit
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.atomic import read_object, storage_errors, write_json
from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_contracts.runs.manifest import MANIFEST
from implicit_llm_contracts.runs.places import PROJECT_DIR, downloads_folder
from implicit_llm_contracts.runs.run_directory import (
    AGAIN,
    WORK,
    committed,
    locked,
    show_result,
)
from implicit_llm_jobs.tracking.mlflow_store import default_uri, sqlite_path
from implicit_llm_jobs.tracking.tracked_run import VARIABLE
from implicit_llm_workflow.experiment_files.data_sets import LanguageModel
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names, experiment_path
from implicit_llm_workflow.planning.plan import DRIVER_RECORD, Plan, UnknownTarget, check_results
from implicit_llm_workflow.planning.staleness import remove_declared
from implicit_llm_workflow.prefetch import LocalFile, needs_of
from implicit_llm_workflow.rules.before_snakemake import check_rule_settings, errors_in_one_line
from implicit_llm_workflow.rules.snakemake_internals import (
    command_line,
    does_run_jobs,
    forced_outputs,
    give_config_file,
    outputs_to_make,
    profile_in_use,
    starts_jobs_here,
)
from implicit_llm_workflow.rules.snakemake_rules import the_config_file

SHOWN = 12


class AcceptedJobForced(UserError):
    """The user forces a job whose result was accepted with other code."""


class TooCostly(UserError):
    """An experiment is too large to be started by a command that does not name it."""


class DriverRunning(UserError):
    """Another process runs this experiment, deletes its results, or accepts them."""


class Driver:
    """The main process of a call of Snakemake; jobs that Snakemake starts in other processes have no driver."""

    def __init__(self, workflow: Any, plan: Plan, logger: logging.Logger) -> None:
        self._workflow, self._plan, self._logger = workflow, plan, logger
        self._lock = ExitStack()
        self._call = command_line()
        self._forced: set[str] = set()

    def begin(self) -> dict[str, str]:
        """Check the call and, if it runs jobs, prepare the run.

        The Snakefile calls this at the end, when all rules are known. Returns: the requested targets that are readable
        paths, with the declared path of each. A UserError, such as UnknownTarget, ends the process with one line.
        """
        with errors_in_one_line(self._logger.error):
            plan, does_run = self._plan, does_run_jobs(self._workflow, self._call)
            check_results(plan.root.parent)
            check_cores(self._call)
            check_rule_settings(self._workflow, profile_in_use())
            found = check_targets(self._workflow, self._call, plan)
            if "prefetch" in self._call.targets:
                the_config_file(plan, self._workflow.configfiles)  # its error would be a traceback inside the rule
            if does_run:
                check_cost(self._call, plan)
                self._prepare()
            outputs = {plan.manifest(node): key for key, node in plan.nodes.items()}
            self._forced = {outputs[path] for path in forced_outputs(self._workflow, self._call, set(outputs))}
            report("stale", plan.stale(), plan, self._logger.info)
            behind = dict.fromkeys(filter(plan.shows_another, plan.nodes), "the wanted one is there")
            report("shows another result", behind, plan, self._logger.info)
            if does_run:
                show_results(plan, behind)
        return found

    @property
    def forced(self) -> set[str]:
        """The keys of the jobs that `-R`, `-f` and `-F` force, and of all jobs that depend on them."""
        return {node.key for node in self._plan.made_from(self._forced)}

    def _prepare(self) -> None:
        plan = self._plan
        self._lock.enter_context(hold_lock(plan.driver_lock))
        atexit.register(self._lock.close)
        write_json(plan.root / DRIVER_RECORD, {"profile": profile_in_use(), "config": plan.experiment.source})
        check_disk(plan)
        give_config_file(self._workflow, plan.write_job_files())
        plan.record_code()
        bring_to_present(plan)
        # A driver that a script starts in the background ignores SIGINT, and must continue to ignore it.
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)

    def before_first_job(self) -> None:
        """Check the files that jobs read, withdraw forced results, extend the stop handlers and create MLflow's store.

        `onstart` calls this when Snakemake has chosen the jobs. A call with --touch computes nothing, so it neither
        checks files nor withdraws results. Without the withdrawal, a forced job would return its existing result.
        Results that depend on a forced result are withdrawn too, since their numbers may change. Their jobs run now, or
        in the next call if this call does not reach them.
        """
        if not self._call.touch:
            with errors_in_one_line(self._logger.error):
                outputs = outputs_to_make(self._workflow)
                check_files(
                    self._plan, {key for key, it in self._plan.nodes.items() if self._plan.manifest(it) in outputs}
                )
                withdraw(self._plan, self._forced, outputs)
        self._record_stops()
        make_mlflow_store(self._plan.root.parent, self._logger)

    def _record_stops(self) -> None:
        """Make the handlers of SIGTERM and Ctrl-C also record that this driver starts no more jobs, for `status`."""
        path = self._plan.root / DRIVER_RECORD

        def stop(handler: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
            with suppress(OSError, UserError):  # the driver must stop although its disk is full
                write_json(path, {**read_object(path), "is_stopping": True})
            handler(number, frame)

        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(handler := signal.getsignal(number)):  # false if the signal is ignored
                signal.signal(number, partial(stop, handler))

    def after_last_job(self) -> None:
        """Send MLflow the journals that it lacks, such as those of short jobs; `onsuccess` and `onerror` call it."""
        from implicit_llm_jobs.tracking.mlflow_writer import late_works

        if late_works(self._plan.root):
            try:
                _mlflow(["implicit_llm_jobs.tracking.mlflow_writer", str(self._plan.root)], self._logger)
            except KeyboardInterrupt:
                self._logger.warning("interrupted: MLflow lacks some metrics, which `implicit-llm mlflow rebuild` adds")


def show_results(plan: Plan, behind: Iterable[str]) -> None:
    """Publish the wanted results of the jobs `behind` in their run directories.

    Also remove the declared manifests of results that are not fresh, so that Snakemake runs the jobs, which check them.
    """
    for key in behind:
        show_result(plan.root / key, Path(plan.work[key]))
    for key, status in plan.statuses.items():
        if status.is_looked_at:
            remove_declared(Path(plan.work[key]))


def withdraw(plan: Plan, forced: Collection[str], outputs: Collection[str]) -> None:
    """Mark the forced jobs that will run, and all jobs that depend on them, to be computed again.

    `outputs`: the outputs of all jobs that will run. The declared manifests are removed, so that Snakemake and
    `explain` see the pending work even after a kill. Raises: AcceptedJobForced for a job whose result was accepted with
    other code, because only the present code can run.
    """
    found = plan.made_from([key for key in forced if plan.manifest(plan.nodes[key]) in outputs])
    if accepted := [node.key for node in found if node.key in plan.accepted]:
        raise AcceptedJobForced(
            f"{accepted[0]}: its result was accepted with other code, but only the present code can compute it again; "
            f"type `implicit-llm accept {plan.argument} {shlex.quote(accepted[0])} --revoke`, then run this again"
        )
    for work in (Path(plan.work[node.key]) for node in found):
        if committed(work) is not None:
            with storage_errors(work):
                (work / AGAIN).touch()
                remove_declared(work)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle the first Ctrl-C: Snakemake starts no more jobs and waits for running ones, which commit their work.

    The driver ignores a second Ctrl-C, at which Snakemake would print a traceback; the running jobs end at once. The
    third one ends the driver.
    """
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))
    raise KeyboardInterrupt


def make_mlflow_store(results: Path, logger: logging.Logger) -> None:
    """Create MLflow's SQLite store if it does not exist: clients that open an empty store at the same time break it.

    The creation holds a lock beside the store. A job that finds no store creates it under the same lock, so a failure
    here is only reported.
    """
    path = sqlite_path(default_uri(results))
    if path is not None and not path.exists():
        _mlflow(["implicit_llm_jobs.tracking.mlflow_store", str(results)], logger)


def _mlflow(module: list[str], logger: logging.Logger) -> None:
    """Run a module in a process of its own, because the driver does not import MLflow; warn if the process fails."""
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = without_password(done.stderr.strip() or "no reason given").splitlines()[-1].removeprefix("error: ")
        logger.warning(
            f"MLflow: {reason}; the jobs run without it, and `implicit-llm mlflow rebuild` brings it up to date later"
        )


def check_targets(workflow: Any, call: argparse.Namespace, plan: Plan) -> dict[str, str]:
    """Check that each requested target, and each word of an option, is the name of a rule or a file that a rule makes.

    Snakemake's own error does not list the names that exist, and it ignores an unknown word of `--omit-from`.
    Returns: targets that are readable paths, with the declared path of each. Raises: UnknownTarget, with the nearest
    target and all names; or, for an option that accepts no readable path, with the path to type.
    """
    forced = call.targets if call.force else ()
    options = {"-R": call.forcerun, "-U": call.until, "-O": call.omit_from, "-P": call.prioritize, "-f": forced}
    if not call.targets and not any(options.values()):
        return {}
    readable = {name: path for node in plan.nodes.values() for name, path in plan.outputs(node).items()}
    declared, found = set(readable.values()), {}
    for option, words in options.items():
        for word in words:
            if path := readable.get(os.path.normpath(word)):
                raise UnknownTarget(f"{word}: with {option}, type the path in the work folder: {path}")
    rules = {rule.name for rule in workflow.rules}
    named = {rule.name for rule in workflow.rules if not rule.has_wildcards()}
    wanted = [(word, named) for word in call.targets] + [(word, rules) for words in options.values() for word in words]
    for word, names in wanted:
        path = os.path.normpath(word)
        if path in readable:
            found[word] = readable[path]
        elif not (word in names or path in declared or _is_made_otherwise(workflow, path, word)):
            raise _unknown(workflow, word, names, plan, readable)
    return found


def _is_made_otherwise(workflow: Any, path: str, word: str) -> bool:
    """Return whether `path` is no result, and a rule makes it: a rule of ours, or of the user's own Snakefile.

    `word` is the path as it was typed, which may be the address of a remote file.
    """
    is_result = f"/{WORK}/" in path or Path(path).name == MANIFEST
    return not is_result and any(rule.is_producer(name) for rule in workflow.rules for name in (path, word))


def _unknown(workflow: Any, word: str, names: Iterable[str], plan: Plan, readable: Iterable[str]) -> UnknownTarget:
    source = plan.experiment.source
    other = os.path.normpath(word).removeprefix(f"{plan.root.parent}/").partition("/")[0]
    if other in experiment_names() - {plan.experiment.name}:
        return UnknownTarget(
            f"{word}: belongs to the experiment {other}, and this call is of {source}; type `snakemake --configfile "
            f"{shlex.quote(str(experiment_path(other)))}` with your other options"
        )
    hint = nearest(word, [*names, *readable, *experiment_names()], f"`{plan.list_command}` lists its jobs")
    if Path(workflow.basedir).resolve() != PROJECT_DIR.resolve():
        hint += "; rules of your own Snakefile must stand above its `include`"
    return UnknownTarget(f"{word}: no target of {source}, by name there are {', '.join(sorted(names))}; {hint}")


def check_cost(call: argparse.Namespace, plan: Plan) -> None:
    """Raise TooCostly for over UNNAMED_HOURS of training on this machine, if the user did not name the experiment."""
    from implicit_llm_workflow.estimates import UNNAMED_HOURS, CostModel

    name = plan.experiment.name
    if call.configfile or name in call.targets or not starts_jobs_here(call):
        return
    hours = CostModel(plan).training_hours
    if hours > UNNAMED_HOURS:
        raise TooCostly(
            f"{plan.experiment.source}: takes {hours:,.0f} hours of training by estimate, and would run on this "
            f"machine; type `implicit-llm run demo` for the small one, or `snakemake {name}` with your other options "
            "for this one"
        )


def check_cores(call: argparse.Namespace) -> None:
    """Raise ConfigError for `--cores 0` or `--jobs 0`, with which Snakemake would wait forever."""
    for option, value in (("--cores", call.cores), ("--jobs", call.jobs)):
        if value is not None and str(value) == "0":
            raise ConfigError(f"command line: {option}: with 0 no job could start; give a whole number of at least 1")


def bring_to_present(plan: Plan) -> None:
    """Set the modification time of manifests to the present if it is in the future, because a clock was wrong.

    Otherwise Snakemake would fail the next job, whose output would be older than its inputs.
    """
    present = time.time()
    for path in map(plan.manifest, plan.nodes.values()):
        with suppress(FileNotFoundError), storage_errors(Path(path)):
            if os.stat(path).st_mtime > present:
                os.utime(path)


def check_disk(plan: Plan) -> None:
    """Raise ConfigError if the disk is too small for a data set of `num_samples` sequences that does not exist yet."""
    free = shutil.disk_usage(plan.root).free
    for node in plan.nodes.values():
        config = node.config
        is_sized = {"num_samples", "length"} <= config.keys()  # a data set of a plugin may lack either
        if node.stage != "data" or not is_sized or plan.statuses[node.key].state != "missing":
            continue
        needed = 2 * config["num_samples"] * config["length"]  # tokens and labels, of at least one byte each
        if needed > free:
            raise ConfigError(
                f"{plan.experiment.source}: data: num_samples: {node.name} with "
                f"{config['num_samples']:,} takes {needed / 2**30:,.0f} GiB or more and {free / 2**30:,.0f} GiB are "
                f"free for {plan.root}; give fewer, or free some space"
            )


def check_files(plan: Plan, keys: Collection[str]) -> None:
    """Raise ConfigError if a job that will compute lacks a local file, or its corpus has fewer files than shards.

    `keys`: the jobs that will run. A job whose result exists does not read the files again.
    """
    from implicit_llm_data.text.corpus import open_share

    computed = {key for key in keys if committed(Path(plan.work[key])) is None}
    at, downloads = plan.experiment.source, downloads_folder()
    try:
        for data in plan.experiment.data.values():
            if isinstance(data, LanguageModel) and not computed.isdisjoint(node.key for node in data.sources()):
                at = f"{plan.experiment.source}: data.{data.name}"
                open_share(data.corpus, downloads, num_shards=data.num_shards)
        at = plan.experiment.source
        for need in needs_of(plan, computed):
            if isinstance(need, LocalFile):
                need.fetch(downloads)
    except UserError as error:
        raise ConfigError(f"{at}: {error}") from error


def report(what: str, jobs: dict[str, str], plan: Plan, say: Callable[[str], None]) -> None:
    """Report the first SHOWN jobs in a line each, and the number of the others. `jobs`: their reasons by key."""
    for key, why in list(jobs.items())[:SHOWN]:
        say(f"{what}: {plan.root / key} ({why})")
    if len(jobs) > SHOWN:
        say(f"{what}: {len(jobs) - SHOWN} more; `{plan.list_command}` lists them")


def hold_lock(path: Path, command: str = "") -> AbstractContextManager[None]:
    """Return a context that holds the lock file `path` of an experiment; a `command` such as "gc" is no driver.

    Snakemake's own lock outlives a killed driver and must be removed manually, so the profiles disable it. The
    context raises DriverRunning if another process holds the lock.
    """
    return locked(
        path,
        lambda holder: DriverRunning(
            f"{path}: another snakemake, `implicit-llm gc` or `accept` ({holder}) works on this experiment; "
            "wait for it or stop it"
        ),
        f"{command}: " if command else "",
    )


COMMAND_CHARS = 2000


def announce() -> None:
    """Describe this invocation in a variable that all its jobs inherit, and unset the variables of a launcher.

    A job that a later driver takes over keeps the inherited value. Call this function only in the main process: a job
    that Snakemake starts in a process of its own also reads the Snakefile.
    """
    command = shlex.join(["snakemake", *sys.argv[1:]])[:COMMAND_CHARS]  # also for `python -m snakemake`
    about = {"id": secrets.token_hex(8), "command": command, "user": os.environ.get("USER")}
    os.environ[VARIABLE] = json.dumps(about)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # if a container or shell sets them, a job would act as one of several processes
