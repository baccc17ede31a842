"""Sub-commands for the store in which MLflow keeps what the runs report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError

mlflow = typer.Typer(
    name="mlflow",
    help="Create or rebuild the store in which MLflow keeps what the runs report.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Results = Annotated[
    Path, typer.Option(help="Folder of the SQLite store, unless MLFLOW_TRACKING_URI is set.", metavar="DIR")
]


@mlflow.command("init")
def init(results: Results = Path("results")) -> None:
    """Create the store before the jobs that write to it; a store that is there is kept.

    A damaged file is moved aside, to mlflow.db.bad-1, and the store rebuilt.

    **Example**

        implicit-llm mlflow init
        mlflow ui --backend-store-uri sqlite:///results/mlflow.db
    """
    from implicit_llm_jobs.tracking.rebuild import ensure_store

    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{results}: cannot be made ({error.strerror}); name another folder by --results") from error
    _say(ensure_store(results))


@mlflow.command("rebuild")
def rebuild(results: Results = Path("results")) -> None:
    """Add to the store what the results hold and it lacks: after an outage, a loss, or damage.

    Runs in the store keep their ids; others get new ids with the same tags, parameters and points. A damaged file is
    moved aside, to mlflow.db.bad-1; nothing is deleted. Jobs may run at the same time.

    **Example**

        implicit-llm mlflow rebuild
    """
    from implicit_llm_jobs.tracking.rebuild import rebuild

    _say(rebuild(results))


def _say(done: object) -> None:
    from implicit_llm_contracts.runs.logs import without_password
    from implicit_llm_jobs.tracking.rebuild import Rebuilt

    if not isinstance(done, Rebuilt):
        return
    if done.set_aside is not None:
        typer.echo(f"damaged store: moved to {done.set_aside}")
    typer.echo(f"{without_password(done.uri)}: {done.num_runs} runs are there")
    if done.failed:
        typer.echo(f"not brought: {', '.join(done.failed)}; the log says why", err=True)
        raise typer.Exit(1)
