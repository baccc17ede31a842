"""Sub-commands that do one job of a workflow each."""

from __future__ import annotations

import importlib
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from implicit_llm_workflow.code_digest import stage_module
from implicit_llm_workflow.errors import UserError
from implicit_llm_workflow.library_module import leave_out_models

# Beside the results, which are not part of a checkout either.
DEFAULT_DOWNLOADS = Path("results/downloads")


class OptionError(UserError):
    """A command-line option cannot be understood."""


RunDir = Annotated[Path, typer.Option(help="Run directory of the job; everything it writes lies there.", metavar="DIR")]
IdentityText = Annotated[
    str,
    typer.Option(
        "--identity",
        help="What the result depends on, as JSON, or @FILE. `implicit-llm identity` prints it.",
        metavar="JSON",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Run directory of a finished job this one reads from. Repeat for each role, or name a JSON file of "
        "directories by role as @FILE.",
        metavar="ROLE=DIR",
    ),
]
Log = Annotated[Path | None, typer.Option(help="File to which the log is appended, besides stderr.", metavar="FILE")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves their number to the libraries.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


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
    downloads: Annotated[
        Path,
        typer.Option(
            envvar="IMPLICIT_LLM_DATA", help="Folder of fetched files, which this job only reads.", metavar="DIR"
        ),
    ] = DEFAULT_DOWNLOADS,
) -> None:
    """Make one data set, or a piece of one: text, a tokenizer, a shard of tokens; with its digests and an index.

    An interrupted job goes on after the last complete file.

    **Example**

        implicit-llm identity data/a5-train --config demo > id.json
        implicit-llm data --run-dir results/demo/data/a5-train --identity @id.json
    """
    _run_stage("data", run_dir, identity, inputs, log, threads=threads or None, downloads=downloads)


def train(
    run_dir: RunDir,
    identity: IdentityText,
    inputs: Inputs = None,
    log: Log = None,
    threads: Threads = 0,
    device: Device = "auto",
    micro_batch_size: Annotated[
        int, typer.Option(min=0, help="Sequences of one forward pass; 0 takes the whole batch at once.")
    ] = 0,
    save_every_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds between checkpoints; more where saving takes over 2 % of the time."),
    ] = 60.0,
    save_steps: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints as well; 0 saves by time alone.")
    ] = 0,
    log_every_steps: Annotated[int, typer.Option(min=1, help="Steps between points of the journal.")] = 10,
    kernels: Annotated[str, typer.Option(help="auto, torch or triton.")] = "auto",
    gradient_checkpointing: Annotated[
        Switch, typer.Option(help="Recompute activations in the backward pass: less memory, more time.")
    ] = Switch.OFF,
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 matrix products.")] = False,
    progress: Annotated[str, typer.Option(help="auto, bar or log.")] = "auto",
    grace_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds from the stop signal to the kill; warns when a save takes longer."),
    ] = None,
    alarm_unconverged_share: Annotated[
        float, typer.Option(min=0, max=1, help="Warn when more than this share of the tokens has no fixed point.")
    ] = 0.5,
    alarm_residual: Annotated[
        float, typer.Option(min=0, help="Warn when the largest residual stays above this one.")
    ] = 0.5,
    resume: Annotated[
        Path | None, typer.Option(help="Checkpoint, or run directory with one, of the same identity to go on from.")
    ] = None,
) -> None:
    """Train one phase of a curriculum; a later phase starts from the checkpoint of the one before it.

    An interrupted job goes on from its last checkpoint, with the same result. SIGTERM ends it with exit code 75 after a
    checkpoint.

    **Example**

        implicit-llm identity train/a5-implicit-s1/unrolled --config demo > id.json
        implicit-llm train --run-dir results/demo/train/a5-implicit-s1/unrolled --identity @id.json
            --input data=results/demo/data/a5-train
    """
    runtime = {
        "threads": threads or None,
        "device": device,
        "micro_batch_size": micro_batch_size or None,
        "save_every_s": save_every_s,
        "save_steps": save_steps or None,
        "log_every_steps": log_every_steps,
        "gradient_checkpointing": True if gradient_checkpointing is Switch.ON else None,
        "kernels": kernels,
        "tf32": tf32,
        "progress": progress,
        "grace_s": grace_s,
        "alarm_unconverged_share": alarm_unconverged_share,
        "alarm_residual": alarm_residual,
        "resume": resume,
    }
    _run_stage("train", run_dir, identity, inputs, log, **runtime)


def evaluate(
    run_dir: RunDir,
    identity: IdentityText,
    inputs: Inputs = None,
    log: Log = None,
    threads: Threads = 0,
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(min=0, help="Sequences at a time; 0 takes the default.")] = 0,
    kernels: Annotated[str, typer.Option(help="auto, torch or triton.")] = "auto",
) -> None:
    """Evaluate a trained model on test sets, in every mode of solving for its fixed point.

    The input `model` is the last training phase, every other input a test set.

    **Example**

        implicit-llm identity evaluate/a5-implicit-s1/free/word-problem --config demo > id.json
        implicit-llm evaluate --run-dir results/demo/evaluate/a5-implicit-s1/free/word-problem --identity @id.json
            --input model=results/demo/train/a5-implicit-s1/free
            --input a5-test-L16-h0.5=results/demo/data/a5-test-L16-h0.5
    """
    runtime = {"threads": threads or None, "device": device, "batch_size": batch_size or None, "kernels": kernels}
    _run_stage("evaluate", run_dir, identity, inputs, log, **runtime)


def report(run_dir: RunDir, identity: IdentityText, inputs: Inputs = None, log: Log = None) -> None:
    """Make the report of an experiment: one HTML page, its figures, and the verdict on every claim.

    The inputs are the training phases and evaluations it shows.

    **Example**

        snakemake --profile profiles/local results/demo/report/manifest.json
    """
    _run_stage("report", run_dir, identity, inputs, log)


STAGES_WITHOUT_MODELS = ("data", "report")
COMMANDS = (data, train, evaluate, report)

mlflow = typer.Typer(
    help="The store in which MLflow keeps what the runs report.", no_args_is_help=True, rich_markup_mode="markdown"
)


@mlflow.callback()
def mlflow_options() -> None:
    """Keeps `init` a sub-command although it is the only one."""


@mlflow.command("init")
def mlflow_init(
    results: Annotated[
        Path, typer.Option(help="Folder of the SQLite store, unless MLFLOW_TRACKING_URI is set.", metavar="DIR")
    ] = Path("results"),
) -> None:
    """Make the store, once, before the jobs that write to it. Harmless when it is there already.

    **Example**

        implicit-llm mlflow init
        mlflow ui --backend-store-uri sqlite:///results/mlflow.db
    """
    from implicit_llm.tracking.mlflow_store import default_uri, initialise

    initialise(default_uri(results))


def _run_stage(
    stage: str, run_dir: Path, identity: str, inputs: list[str] | None, log: Path | None, **runtime: Any
) -> None:
    """Hand the job to its stage, with the options that were set."""
    # Compute nodes are often without internet, and a look at the hub then waits for a timeout each time: what is needed
    # has been fetched before. To read from the hub inside jobs, set HF_HUB_OFFLINE=0.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    directories = parse_inputs(inputs or [])
    options = {key: value for key, value in runtime.items() if value is not None}
    if stage == "data" and options.get("threads"):
        os.environ["RAYON_NUM_THREADS"] = str(options["threads"])  # of the tokenizers
    if stage in STAGES_WITHOUT_MODELS:
        leave_out_models()
    from implicit_llm.runs.identity import Identity
    from implicit_llm.runs.stage import StageRequest, run_stage

    name = stage_module(stage, Identity.parse(identity).config)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        kind = name.rpartition(".")[2]
        raise OptionError(
            f"--identity: stage {stage} has no kind {kind!r}; let the workflow make the identity"
        ) from error
    input_names = getattr(module, "INPUT_NAMES", None)
    run_stage(StageRequest(run_dir, identity, directories, options, log, input_names=input_names), module.run)


def parse_inputs(options: list[str]) -> dict[str, Path]:
    """Role -> directory from ROLE=DIR or @FILE; a role may hold anything but "=". Raises: OptionError."""
    directories: dict[str, Path] = {}
    for option in options:
        for role, directory in _given_inputs(option):
            if role in directories:
                raise OptionError(f"--input {option}: role {role!r} is given twice; remove one")
            directories[role] = Path(directory)
    return directories


def _given_inputs(option: str) -> list[tuple[str, str]]:
    if option.startswith("@"):
        return _inputs_in_file(Path(option[1:]))
    role, equals, directory = option.partition("=")
    if not (role and equals and directory):
        raise OptionError(f"--input {option}: must have the form ROLE=DIR, for example data=results/demo/data/a5-train")
    return [(role, directory)]


def _inputs_in_file(path: Path) -> list[tuple[str, str]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"--input @{path}: cannot be read ({error.strerror}); let the workflow write the file"
        ) from error
    except ValueError as error:
        raise OptionError(f"--input @{path}: is not JSON ({error}); let the workflow write the file") from error
    if not isinstance(values, dict) or not all(isinstance(item, str) and item for item in values.values()):
        raise OptionError(
            f'--input @{path}: must be a JSON object {{"ROLE": "DIR", ...}}; let the workflow write the file'
        )
    return list(values.items())
