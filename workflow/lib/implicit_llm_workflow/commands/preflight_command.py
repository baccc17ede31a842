"""The sub-command `preflight`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_workflow.commands.job import Device, Kernels


def preflight(
    hardware: Annotated[str, typer.Option(help="Name of the hardware class, for messages.", metavar="NAME")],
    report: Annotated[Path | None, typer.Option(help="JSON file for what was found.", metavar="FILE")] = None,
    results: Annotated[Path, typer.Option(help="Folder in which results must be writable.", metavar="DIR")] = Path(
        "results"
    ),
    device: Device = "auto",
    kernels: Kernels = "auto",
    checkpoint_bytes: Annotated[int, typer.Option(min=0, help="Size of the largest checkpoint.", metavar="BYTES")] = 0,
) -> None:
    """Look whether this machine can do the jobs of a hardware class: driver, kernels, process group, disk, versions.

    Takes seconds. What is wrong is one line with the fix; the executor hears of class `env`.

    **Example**

        srun --partition=h100 --gpus=1 implicit-llm preflight --hardware h100 --device cuda
    """
    from implicit_llm_contracts.runs import logs
    from implicit_llm_contracts.runs.atomic import write_atomic
    from implicit_llm_workflow.launching.preflight import Preflight

    with logs.configured(None):
        found = Preflight(hardware, device, kernels, results, checkpoint_bytes, Path.cwd()).run()
    if report is not None:
        write_atomic(report, json.dumps(found, indent=1) + "\n")
