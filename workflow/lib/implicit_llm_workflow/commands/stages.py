"""The commands that do one job of a workflow each: `data`, `train` and `preflight`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs.places import DEFAULT_DOWNLOADS
from implicit_llm_workflow.commands.job import (
    MACHINE_PANEL,
    Device,
    Downloads,
    IdentityText,
    Inputs,
    Job,
    Kernels,
    Log,
    RunDir,
    Threads,
    run_job,
)
from implicit_llm_workflow.launching.launch import LaunchRequest, launch, leave_other_processes

STOPS, PROGRESS = "Checkpoints and stops", "Progress and alarms"


class Switch(StrEnum):
    """As text, so that a resource of a rule can hold it."""

    ON = "on"
    OFF = "off"


def data(
    run_dir: RunDir,
    identity: IdentityText,
    inputs: Inputs = None,
    log: Log = None,
    threads: Threads = 0,
    downloads: Downloads = DEFAULT_DOWNLOADS,
) -> None:
    """Make one data set, or a piece of one: word problems, text, a tokenizer, or a shard of tokens.

    An interrupted job resumes after the last complete file.

    **Example**

        implicit-llm explain --identity data/a5-train --config demo > id.json
        implicit-llm data --run-dir results/demo/data/a5-train --identity @id.json
    """
    run_job(Job("data", run_dir, identity, inputs, log, {"threads": threads or None, "downloads": downloads}))


def train(
    run_dir: RunDir,
    identity: IdentityText,
    inputs: Inputs = None,
    log: Log = None,
    threads: Threads = 0,
    device: Device = "auto",
    micro_batch_size: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sequences of one forward pass; 0 takes the whole batch at once.",
            metavar="N",
            rich_help_panel=MACHINE_PANEL,
        ),
    ] = 0,
    save_every_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between checkpoints; more where saving takes over 2 % of the time.",
            metavar="SECONDS",
            rich_help_panel=STOPS,
        ),
    ] = 60.0,
    save_steps: Annotated[
        int,
        typer.Option(
            min=0, help="Steps between checkpoints as well; 0 saves by time alone.", metavar="N", rich_help_panel=STOPS
        ),
    ] = 0,
    log_every_steps: Annotated[
        int, typer.Option(min=1, help="Steps between points of the journal.", metavar="N", rich_help_panel=PROGRESS)
    ] = 10,
    kernels: Kernels = "auto",
    gradient_checkpointing: Annotated[
        Switch,
        typer.Option(
            help="Recompute activations in the backward pass: less memory, more time.",
            metavar="on|off",
            rich_help_panel=MACHINE_PANEL,
        ),
    ] = Switch.OFF,
    cuda_graphs: Annotated[
        Switch,
        typer.Option(
            help="On a GPU, start the kernels of a training pass by one call; the numbers are the same.",
            metavar="on|off",
            rich_help_panel=MACHINE_PANEL,
        ),
    ] = Switch.ON,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Allow TF32 matrix products.", metavar="", rich_help_panel=MACHINE_PANEL)
    ] = False,
    progress: Annotated[str, typer.Option(help="auto, bar or log.", metavar="NAME", rich_help_panel=PROGRESS)] = "auto",
    grace_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds from the stop signal to the kill; warns when a save takes longer.",
            metavar="SECONDS",
            rich_help_panel=STOPS,
        ),
    ] = None,
    hang_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="End the job, with its stacks, after so long without progress; 0 waits for ever.",
            metavar="SECONDS",
            rich_help_panel=STOPS,
        ),
    ] = 1800.0,
    nodes: Annotated[
        int,
        typer.Option(
            min=1, help="Nodes of the Slurm allocation that train together.", metavar="N", rich_help_panel=MACHINE_PANEL
        ),
    ] = 1,
    processes_per_node: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes on each node, one for each GPU; they share its CPU threads.",
            metavar="N",
            rich_help_panel=MACHINE_PANEL,
        ),
    ] = 1,
    alarm_unconverged_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Warn when more than this share of the tokens has no fixed point.",
            metavar="SHARE",
            rich_help_panel=PROGRESS,
        ),
    ] = Runtime.alarm_unconverged_share,
    alarm_residual: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Warn when the largest residual stays above this one.",
            metavar="RESIDUAL",
            rich_help_panel=PROGRESS,
        ),
    ] = Runtime.alarm_residual,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint, or run directory with one, of the same identity to resume from.",
            metavar="DIR",
            rich_help_panel=STOPS,
        ),
    ] = None,
) -> None:
    """Train one phase of a curriculum; a later phase starts from the checkpoint of the one before it.

    An interrupted job resumes from its last checkpoint, with the same result. Ctrl-C, SIGTERM and SIGUSR2 end it with
    exit code 75 after a checkpoint; a second Ctrl-C ends it at once.

    **Example**

        implicit-llm explain --config demo \\
            --identity train/a5-implicit-s1/unrolled > id.json
        implicit-llm train --run-dir results/demo/train/a5-implicit-s1/unrolled \\
            --identity @id.json --input data=results/demo/data/a5-train
    """
    worker = ("-m", "implicit_llm_workflow.console", *sys.argv[1:])
    request = LaunchRequest(nodes, processes_per_node, run_dir, worker, threads // processes_per_node)
    if request.is_needed:
        launch(request)
        return
    runtime = {
        "threads": (threads and max(1, threads // processes_per_node)) or None,
        "device": device,
        "micro_batch_size": micro_batch_size or None,
        "save_every_s": save_every_s,
        "save_steps": save_steps or None,
        "log_every_steps": log_every_steps,
        "gradient_checkpointing": True if gradient_checkpointing is Switch.ON else None,
        "cuda_graphs": cuda_graphs is Switch.ON,
        "kernels": kernels,
        "tf32": tf32,
        "progress": progress,
        "grace_s": grace_s,
        "hang_s": hang_s,
        "alarm_unconverged_share": alarm_unconverged_share,
        "alarm_residual": alarm_residual,
        "resume": resume,
    }
    run_job(Job("train", run_dir, identity, inputs, log, runtime))
    leave_other_processes()


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
    """Check in seconds that this machine can run the jobs of a hardware class: driver, kernels, process group, disk.

    It stops at the first check that fails, with one line that says what to do; to the executor the failure is `env`.

    **Example**

        srun --partition=h100 --gpus=1 \\
            implicit-llm preflight --hardware h100 --device cuda
    """
    import json

    from implicit_llm_contracts.runs import logs
    from implicit_llm_contracts.runs.atomic import write_atomic
    from implicit_llm_workflow.launching.preflight import Preflight

    with logs.configured(None):
        found = Preflight(hardware, device, kernels, results, checkpoint_bytes, Path.cwd()).run()
    if report is not None:
        write_atomic(report, json.dumps(found, indent=1) + "\n")
