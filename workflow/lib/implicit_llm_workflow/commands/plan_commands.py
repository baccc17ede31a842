"""Sub-commands that look at a whole experiment and run nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from implicit_llm_workflow.planning.plan import Plan

Config = Annotated[
    str, typer.Option(help="Experiment: a file, or the name of one of workflow/config/.", metavar="FILE")
]
Results = Annotated[Path, typer.Option(help="Folder of all results.", metavar="DIR")]
DEFAULT_CONFIG = "demo"
DEFAULT_RESULTS = Path("results")
_STYLE = {"fresh": "green", "stale": "yellow", "missing": "dim"}


def identity(
    target: Annotated[
        str,
        typer.Argument(
            help="A job, such as train/a5-implicit-s1/free, or its run directory or manifest.", show_default=False
        ),
    ],
    config: Config = DEFAULT_CONFIG,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Print what the result of a job depends on: its config, its code and the fingerprints of its inputs, as JSON.

    **Example**

        implicit-llm identity data/a5-train --config demo > id.json
    """
    plan = make_plan(config, results)
    typer.echo(plan.identities[plan.find(target).key].to_json())


def nodes(config: Config = DEFAULT_CONFIG, results: Results = DEFAULT_RESULTS) -> None:
    """List the jobs of an experiment: which results are fresh, stale or missing, and why.

    **Example**

        implicit-llm nodes --config workflow/config/demo.yaml
    """
    from rich.table import Table

    plan = make_plan(config, results)
    statuses = plan.statuses
    table = Table("job", "state", "fingerprint", "why", box=None, pad_edge=False)
    for key, status in statuses.items():
        style = _STYLE[status.state]
        table.add_row(key, f"[{style}]{status.state}[/{style}]", plan.identities[key].fingerprint[:16], status.why)
    console = wide_console()
    console.print(table)
    counts: Counter[str] = Counter(status.state for status in statuses.values())
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLE if counts[state]))


def headline(config: Config = DEFAULT_CONFIG, results: Results = DEFAULT_RESULTS) -> None:
    """Print the main numbers of an experiment, and where its report and MLflow runs are.

    **Example**

        implicit-llm headline --config demo
    """
    from implicit_llm_workflow.results.headline import headline_tables, where_to_look

    plan = make_plan(config, results)
    console = wide_console()
    for table in headline_tables(plan):
        console.print(table)
    for line in where_to_look(plan):
        console.print(line)


COMMANDS = (identity, nodes, headline)


def wide_console(is_error: bool = False) -> Console:
    """As wide as the terminal; into a file or a pipe wide enough for whole lines. `is_error`: on stderr."""
    from rich.console import Console

    console = Console(highlight=False, stderr=is_error)
    return console if console.is_terminal else Console(width=240, highlight=False, stderr=is_error)


def make_plan(config: str, results: Path) -> Plan:
    from implicit_llm_workflow.experiment_files.config_files import experiment_path
    from implicit_llm_workflow.experiment_files.experiment import load_experiment
    from implicit_llm_workflow.planning.plan import Plan

    return Plan(load_experiment(experiment_path(config)), results)
