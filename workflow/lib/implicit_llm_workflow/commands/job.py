"""Running one job of a workflow: the options that all of them have, and the way to their stage."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import job_function, load_plugin, owner_of
from implicit_llm_contracts.runs import signals
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_workflow.planning.code_digest import plugin_paths, stage_module
from implicit_llm_workflow.planning.submitted_code import require_submitted_code

DEVICES = ("auto", "cpu", "cuda")
EXIT_START_AGAIN = 75  # of a job asked to stop outside of training: what it has finished stays


class OptionError(UserError):
    """A command-line option cannot be understood."""


JOB_PANEL, MACHINE_PANEL = "As a job of a workflow", "Use of the machine"
_RUN_DIR = typer.Option(
    help="Run directory of the job; it writes nowhere else.", metavar="DIR", rich_help_panel=JOB_PANEL
)
_IDENTITY = typer.Option(
    "--identity",
    help="The identity of the result, as JSON, or @FILE. `implicit-llm explain --identity` prints it.",
    metavar="JSON",
    rich_help_panel=JOB_PANEL,
)
_INPUTS = typer.Option(
    "--input",
    help="Run directory of a finished job that this one reads, by role. Repeatable; or a JSON file of them, as @FILE.",
    metavar="ROLE=DIR",
    rich_help_panel=JOB_PANEL,
)
RunDir = Annotated[Path, _RUN_DIR]
IdentityText = Annotated[str, _IDENTITY]
JobDir = Annotated[Path | None, _RUN_DIR]  # of commands that do more than jobs
JobIdentity = Annotated[str | None, _IDENTITY]
Inputs = Annotated[list[str] | None, _INPUTS]
Log = Annotated[Path | None, typer.Option(help="File to which the log is appended, besides stderr.", metavar="FILE")]
Threads = Annotated[
    int,
    typer.Option(
        min=0, help="CPU threads; 0 leaves their number to the libraries.", metavar="N", rich_help_panel=MACHINE_PANEL
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu or cuda.", metavar="NAME", rich_help_panel=MACHINE_PANEL, callback=lambda name: _device(name)
    ),
]
Kernels = Annotated[str, typer.Option(help="auto, torch or triton.", metavar="NAME", rich_help_panel=MACHINE_PANEL)]
Downloads = Annotated[
    Path,
    typer.Option(envvar="IMPLICIT_LLM_DATA", help="Folder of fetched files, which this job only reads.", metavar="DIR"),
]


def _device(name: str) -> str:
    """Raises: OptionError, before a mistyped name is taken for a CPU."""
    if name not in DEVICES:
        raise OptionError(f"--device: there is no device {name!r}; {nearest(name, DEVICES)}")
    return name


@dataclass(frozen=True)
class Job:
    """What a command was told to do. `runtime`: options of the stage, of which None means not set.

    `kind`: the one that the identity must have, for a command that does only that.
    """

    stage: str
    run_dir: Path
    identity: str
    inputs: list[str] | None = None
    log: Path | None = None
    runtime: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None


def run_job(job: Job) -> None:
    """Hand the job to its stage, with the options that were set. Raises: UserError, and what the stage raises."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # it is ignored where a launcher passes it on later
        signals.handle(signal.SIGUSR2, lambda number, frame: sys.exit(EXIT_START_AGAIN))
    # Compute nodes are often without internet, and a look at the hub then waits for a timeout each time: what is needed
    # has been fetched before. To read from the hub inside jobs, set HF_HUB_OFFLINE=0.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    directories = parse_inputs(job.inputs or [])
    options = {key: value for key, value in job.runtime.items() if value is not None}
    if job.stage == "data" and options.get("threads"):
        os.environ["RAYON_NUM_THREADS"] = str(options["threads"])  # of the tokenizers
    from implicit_llm_contracts.runs.identity import Identity
    from implicit_llm_contracts.runs.run_directory import work_directory
    from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
    from implicit_llm_jobs.stage import StageRequest, run_stage

    identity = Identity.parse(job.identity)
    config = identity.config
    if job.kind is not None and config.get("kind") != job.kind:
        raise OptionError(
            f"--identity: is one of kind {config.get('kind')!r}, and this command does {job.kind!r}; "
            f"type `implicit-llm {job.stage} {str(config.get('kind')).replace('_', '-')}`"
        )
    plugins = plugin_paths(config)
    for plugin in plugins:
        load_plugin(Path(plugin))
    name = stage_module(job.stage, config)
    module = _import_stage(job.stage, name)
    is_own = owner_of(job.stage, config.get("kind", "")) is not None
    run = getattr(module, job_function(job.stage, config["kind"]) if is_own else "run")

    def check_code() -> None:
        require_submitted_code(name, identity.code, f"{identity.stage}/{identity.name}", plugins)

    def body(context: StageContext) -> StageResult:
        check_code()
        return run(context)

    reads = getattr(module, "reads_of_inputs", None)
    request = StageRequest(job.run_dir, job.identity, directories, options, job.log, reads=reads)
    # A finished result, which may have been accepted with other code, only has to be found again.
    if request.again is not None or not (work_directory(job.run_dir, identity.fingerprint) / MANIFEST).is_file():
        check_code()
    run_stage(request, body)


def _import_stage(stage: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        kind = name.rpartition(".")[2]
        raise OptionError(
            f"--identity: stage {stage} has no kind {kind!r}; let the workflow make the identity"
        ) from error


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
