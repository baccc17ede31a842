"""The command `init`: a folder of one's own for experiments, with the workflow of the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.project_dirs import CONFIG_DIR, ENVIRONMENTS_DIR, PROJECT_DIR

SNAKEFILE = """\
# The rules are those of the installed package; the experiments beside this file, in workflow/config/, are yours.
from implicit_llm_workflow.project_dirs import PROJECT_DIR


include: str(PROJECT_DIR / "Snakefile")


localrules:
    everything,


# Snakemake takes no default target from an included file.
rule everything:
    default_target: True
    input:
        rules.all.input,
"""
README = """\
# Experiments with implicit language models

Experiments are the files of `workflow/config/`, `demo.yaml` the smallest of them; edit them, or add one of your own.
Results go to `results/`. Type in this folder:

    implicit-llm explain --config demo                                                  # what would run, and why
    snakemake --profile profiles/local --configfile workflow/config/demo.yaml           # run it; again, to go on
    implicit-llm status --config demo                                                   # from a second terminal

The report is `results/demo/report/index.html`.
"""
IGNORED = "/results/\n/.snakemake/\n"
_GENERATED = shutil.ignore_patterns("__pycache__")


class InitError(UserError):
    """The folder cannot be set up."""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.", metavar="DIR")],
) -> None:
    """Set up a folder for experiments of your own: Snakefile, profiles and the project's experiments as a start.

    Rules and code stay in the installed package. An experiment finds models, tasks and curricula beside it first, so
    that what you edit or add in DIR/workflow/config/ holds there. Nothing that is there is overwritten.

    **Example**

        implicit-llm init my-study
        cd my-study
        snakemake --profile profiles/local --configfile workflow/config/demo.yaml -n
    """
    made = write_project(folder)
    typer.echo(f"{folder}: {', '.join(made)}")
    typer.echo(f"next: cd {folder} && snakemake --profile profiles/local --configfile workflow/config/demo.yaml -n")


def write_project(folder: Path) -> list[str]:
    """Write the files; a folder gets all of them or none. Returns: what was written. Raises: InitError."""
    copies = {
        "profiles": PROJECT_DIR / "profiles",
        "workflow/config": CONFIG_DIR,
        "envs": ENVIRONMENTS_DIR,
    }
    texts = {"Snakefile": SNAKEFILE, ".gitignore": IGNORED}
    if not (folder / "README.md").exists():  # a repository often has one
        texts["README.md"] = README
    for name in (*copies, *texts):
        if (folder / name).exists():
            raise InitError(f"{folder / name}: is there already; name another folder, or move it away")
    try:
        for name, source in copies.items():
            shutil.copytree(source, folder / name, ignore=_GENERATED)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InitError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from error
    return [*copies, *texts]
