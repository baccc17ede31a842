"""What the driver adds to Snakemake: forcing of stale results, a lock that dies with its process, help with targets.

Snakemake decides from its own records in `.snakemake/`, which can be deleted; the manifests say the same without them.
It also tells the jobs which invocation of Snakemake they belong to, so that they can tell MLflow.
"""

import argparse
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs import MANIFEST, ConfigError, UserError, again_file, locked, write_json
from implicit_llm_jobs.provenance import git_state
from implicit_llm_jobs.tracking.mlflow_store import default_uri, sqlite_path
from implicit_llm_jobs.tracking.tracked_run import VARIABLE, Invocation
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names, experiment_path
from implicit_llm_workflow.planning.plan import DRIVER_RECORD, Plan, UnknownTarget
from implicit_llm_workflow.rules.snakemake_internals import (
    around_job_graph,
    does_run_jobs,
    force,
    forced_outputs,
    give_config_file,
    is_made,
    only_touches,
    outputs_to_make,
    rules_with_settings,
    targets,
)

SHOWN_STALE = 12


class AcceptedJobForced(UserError):
    """The user forces a job whose result was accepted with other code."""


class DriverRunning(UserError):
    """Another Snakemake works on the same experiment."""


class Driver:
    """The main process of a call of Snakemake, which the jobs that it starts in processes of their own do not have."""

    def __init__(self, workflow: Any, plan: Plan, logger: logging.Logger) -> None:
        self._workflow, self._plan, self._logger = workflow, plan, logger
        self._lock = ExitStack()
        self._forced: set[str] = set()

    def force_stale(self) -> None:
        """Have the jobs of stale results run, as far as the requested targets need them, and write what they are given.

        Where the job graph is made, an unknown target or another driver ends the process. Raises: UnsupportedSnakemake.
        """
        report_stale(self._plan.stale(), self._plan.experiment.source, self._logger.info)
        around_job_graph(self._workflow, self._before_graph, self._after_graph)

    def _before_graph(self) -> None:
        plan = self._plan
        with errors_in_one_line(self._logger):
            check_rules_of_profile(self._workflow)
            check_targets(self._workflow, plan)
            if does_run_jobs(self._workflow):
                self._lock.enter_context(hold_lock(plan.driver_lock))
                write_json(plan.root / DRIVER_RECORD, {"profile": profile_in_use()})
                check_disk(plan)
                give_config_file(self._workflow, plan.write_job_files())
                plan.record_code()
                if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # it is ignored in the background
                    signal.signal(signal.SIGINT, _interrupt)

    def _after_graph(self) -> None:
        with errors_in_one_line(self._logger):
            self._forced = set() if only_touches(self._workflow) else forced_by_user(self._workflow, self._plan)
        self._plan.force(self._forced)
        force(self._workflow, self._plan.stale())

    def before_first_job(self) -> None:
        """For `onstart`, when Snakemake knows which jobs it will run.

        Asks the jobs that the user forces to compute again; a job otherwise returns the result that it finds. The
        request is a file beside a job's identity. The first attempt removes it, so later attempts resume from what the
        first one saved. Jobs that read these results are asked too, since their numbers may change, in this run or in
        the next.
        """
        for node in self._plan.made_from(self._forced & outputs_to_make(self._workflow)):
            again_file(self._plan.identity_file(node)).touch()
        make_mlflow_store(self._plan.root.parent, self._logger)

    def after_last_job(self) -> None:
        """For `onsuccess` and `onerror`: bring to MLflow what short jobs have left to their call of Snakemake."""
        from implicit_llm_jobs.tracking.mlflow_writer import late_works

        if late_works(self._plan.root):
            _mlflow(["implicit_llm_jobs.tracking.mlflow_writer", str(self._plan.root)], self._logger)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """The first Ctrl-C: Snakemake starts no more jobs and waits for those that run, which commit what they have.

    A second one is for these jobs alone, which it ends at once; Snakemake would answer it with a traceback. A third one
    ends the driver.
    """
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))
    raise KeyboardInterrupt


def forced_by_user(workflow: Any, plan: Plan) -> set[str]:
    """Manifests of the jobs that `-R`, `-f` and `-F` force, by rule or by file.

    Raises: AcceptedJobForced for one that would have to be computed by the code of an accepted result.
    """
    forced = forced_outputs(workflow, lambda: {plan.manifest(node) for node in plan.nodes.values()})
    accepted = [node.key for node in plan.made_from(forced) if node.key in plan.accepted]
    if accepted:
        config = plan.experiment.source
        raise AcceptedJobForced(
            f"{accepted[0]}: its result was accepted with other code, but only the present code can compute it again; "
            f"type `implicit-llm accept --revoke {shlex.quote(accepted[0])} --config {config}`, then run this again"
        )
    return forced


def make_mlflow_store(results: Path, logger: logging.Logger) -> None:
    """Make MLflow's SQLite store if there is none: clients that open an empty one at the same time break it.

    A job that is run by hand takes the same lock. No job waits for a store, so a failure is reported
    and stops nothing.
    """
    path = sqlite_path(default_uri(results))
    if path is not None and not path.exists():
        _mlflow(["implicit_llm_jobs.tracking.mlflow_store", str(results)], logger)


def _mlflow(module: list[str], logger: logging.Logger) -> None:
    """Run a module that loads MLflow, which the driver does not."""
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1].removeprefix("error: ")
        logger.warning(
            f"MLflow: {reason}; the jobs run without it, and `implicit-llm mlflow rebuild` brings it up to date later"
        )


@contextmanager
def errors_in_one_line(logger: logging.Logger) -> Iterator[None]:
    """End the process with the message of an error that the user can cure: Snakemake would show where it was raised."""
    try:
        yield
    except UserError as error:
        logger.error(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        logger.error("interrupted before the first job")
        sys.exit(128 + signal.SIGINT)


def check_targets(workflow: Any, plan: Plan) -> None:
    """See that a rule makes each requested target; Snakemake's own refusal does not say what there is.

    Raises: UnknownTarget, with the nearest target and with all that have a name.
    """
    manifests = {plan.manifest(node) for node in plan.nodes.values()}
    for target in targets(workflow):
        path = os.path.normpath(target)
        if workflow.is_rule(target) or path in manifests:
            continue
        if Path(path).name != MANIFEST and is_made(workflow, path):
            continue
        source = plan.experiment.source
        if target in experiment_names():
            raise UnknownTarget(
                f"{target}: is an experiment of its own, and this call is of {source}; type `snakemake --configfile "
                f"{experiment_path(target)}` with your other options"
            )
        names = {rule.name for rule in workflow.rules if not rule.has_wildcards()}
        hint = nearest(target, [*names, *manifests], f"`{plan.list_command}` lists its jobs")
        raise UnknownTarget(f"{target}: no target of {source}, by name there are {', '.join(sorted(names))}; {hint}")


def check_rules_of_profile(workflow: Any) -> None:
    """Raises: ConfigError for a rule that a profile or the command sets something of, and that there is not."""
    names = {rule.name for rule in workflow.rules}
    for option, rules in rules_with_settings(workflow).items():
        for rule in rules:
            if rule not in names:
                where = profile_in_use() or "command line"
                raise ConfigError(f"{where}: {option}: there is no rule {rule!r}; {nearest(rule, names)}")


def check_disk(plan: Plan) -> None:
    """Raises: ConfigError for word problems that are still to be made and for which the disk is too small."""
    free = shutil.disk_usage(plan.root).free
    for node in plan.nodes.values():
        config = node.config
        if node.stage != "data" or "num_samples" not in config or plan.statuses[node.key].state != "missing":
            continue
        needed = 2 * config["num_samples"] * config["length"]  # tokens and labels, of at least one byte each
        if needed > free:
            raise ConfigError(
                f"{plan.experiment.source}: data: num_samples: {node.name} with "
                f"{config['num_samples']:,} takes {needed / 2**30:,.0f} GiB or more and {free / 2**30:,.0f} GiB are "
                f"free for {plan.root}; give fewer, or free some space"
            )


def report_stale(stale: dict[str, str], config: str, say: Callable[[str], None]) -> None:
    """One line for each stale result, the first ones of many. `config`: the experiment's file."""
    for manifest, why in list(stale.items())[:SHOWN_STALE]:
        say(f"stale: {Path(manifest).parent} ({why})")
    if len(stale) > SHOWN_STALE:
        say(f"stale: {len(stale) - SHOWN_STALE} more; `implicit-llm status --jobs --config {config}` lists them")


def hold_lock(path: Path) -> AbstractContextManager[None]:
    """Hold the lock of an experiment.

    Snakemake's own lock outlives a killed driver and has to be removed by hand, so the profiles switch it off.
    Raises: DriverRunning.
    """
    return locked(
        path,
        lambda holder: DriverRunning(
            f"{path}: another Snakemake ({holder}) works on this experiment; wait for it or stop it"
        ),
    )


COMMAND_CHARS = 2000


def announce() -> None:
    """Describe this invocation in a variable that all its jobs inherit, those on Slurm included.

    A job that a later driver takes over keeps what it has inherited. Call it in the main process only: a job that
    Snakemake starts in a process of its own reads the Snakefile too.
    """
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    started, command = datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(words)[:COMMAND_CHARS]
    about = Invocation(
        secrets.token_hex(8), started, command, (git_state() or {}).get("commit"), os.environ.get("USER")
    )
    os.environ[VARIABLE] = json.dumps(asdict(about))


def profile_in_use() -> str | None:
    """The profile of this call of Snakemake, which does not tell its Snakefile."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", default=os.environ.get("SNAKEMAKE_PROFILE"))
    return parser.parse_known_args(sys.argv[1:])[0].profile
