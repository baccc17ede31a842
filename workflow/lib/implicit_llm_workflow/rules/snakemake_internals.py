"""What the driver uses of Snakemake that has no public interface: all of it is here, and nowhere else.

A Snakefile is not told its targets, and cannot say that a result is stale which Snakemake's own records hold for fresh.
tests/workflow/test_snakemake_internals.py fails in a release where one of these functions means something else.
"""

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import UserError


class UnsupportedSnakemake(UserError):
    """This release of Snakemake cannot be told which results are stale."""


def around_job_graph(workflow: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` when the targets are known, and `after` when there is a job graph whose jobs are not chosen yet.

    Raises: UnsupportedSnakemake.
    """
    prepare = getattr(workflow, "_prepare_dag", None)
    if prepare is None:
        raise UnsupportedSnakemake(
            "this release of Snakemake builds its job graph in another way; install snakemake>=9.12,<10"
        )

    def prepare_between(*args: Any, **kwargs: Any) -> None:
        before()
        prepare(*args, **kwargs)
        after()

    workflow._prepare_dag = prepare_between


def force(workflow: Any, outputs: Iterable[str]) -> None:
    """Have the jobs of these outputs run as far as the targets need them; `--forcerun` would also make them targets."""
    workflow.dag.forcefiles.update(outputs)


def forced_outputs(workflow: Any, outputs: Callable[[], Collection[str]]) -> set[str]:
    """Those of the outputs that `-R`, `-f` and `-F` force, by rule or by file; asked for only where any are."""
    rules, files = workflow.dag.forcerules, workflow.dag.forcefiles
    if not (rules or files):
        return set()
    return {path for path in outputs() if path in files or any(rule.is_producer(path) for rule in rules)}


def outputs_to_make(workflow: Any) -> set[str]:
    """Outputs of the jobs that will run, once they are chosen."""
    return {str(path) for job in workflow.dag.needrun_jobs() for path in job.output}


def targets(workflow: Any) -> list[str]:
    """The words of the command that are neither options nor taken by one."""
    return list(workflow.dag_settings.targets)


def is_made(workflow: Any, path: str) -> bool:
    """Whether a rule has this output."""
    return any(rule.is_producer(os.path.normpath(path)) for rule in workflow.rules)


def resource_of(workflow: Any, rule: str, name: str) -> str | None:
    """A resource of a rule that is a text, as the profile in use sets it; None where it is not set."""
    found = workflow.get_rule(rule).resources.get(name)
    return str(getattr(found, "raw", found) or "").strip("'\"") or None


def give_config_file(workflow: Any, path: Path) -> None:
    """Have the jobs that start from now on read this config file, in place of those of this call."""
    workflow.config_settings.configfiles = [path.resolve()]


def does_run_jobs(workflow: Any) -> bool:
    """Whether this call of Snakemake runs jobs, rather than looking at them."""
    return not workflow.dryrun and workflow.executor_plugin is not None


def only_touches(workflow: Any) -> bool:
    """Whether this call of Snakemake marks results as up to date, by `--touch`, and computes none."""
    return bool(workflow.touch)


def rules_with_settings(workflow: Any) -> dict[str, list[str]]:
    """The names of rules for which a profile or the command line sets resources or threads, by option."""
    settings = workflow.resource_settings
    return {"set-resources": list(settings.overwrite_resources), "set-threads": list(settings.overwrite_threads)}
