"""Runs `snakemake` and `implicit-llm` for tiny_project.py, in forks that have Snakemake imported already.

An order is {"words": [...], "cwd": ..., "environment": {...}, "stdout": path, "stderr": path}. The driver and
the library are imported after the fork, from the PYTHONPATH of the order.
"""

import os
import sys
from importlib import import_module
from typing import Any

import rich.table  # noqa: F401
import snakemake.cli
import snakemake.report
import snakemake.workflow
import typer  # noqa: F401
import yaml  # noqa: F401
from snakemake.scheduling import greedy, job_scheduler  # noqa: F401

from tests.fault.forks import serve

MAINS = {"snakemake": "snakemake.cli", "implicit-llm": "implicit_llm_workflow.console"}
INSTALLED = sys.path[1:]  # without this folder


def run(order: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    for target, source in enumerate((os.devnull, order["stdout"], order["stderr"])):
        os.dup2(os.open(source, os.O_RDWR | os.O_CREAT), target)
    sys.path[:] = [*order["environment"]["PYTHONPATH"].split(os.pathsep), *INSTALLED]
    sys.argv = order["words"]
    code: Any = 0
    try:
        code = import_module(MAINS[order["words"][0]]).main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


if __name__ == "__main__":
    snakemake.cli.get_argument_parser()  # looks for the plugins
    serve(run)
