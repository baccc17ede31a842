"""Define the commands that run one job, `job` and `train`, and `preflight`, which checks a machine before its jobs."""

import importlib
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import typer

from implicit_llm_contracts.config.training import Kernels, Runtime
from implicit_llm_contracts.config.values import Count
from implicit_llm_contracts.errors import Preempted
from implicit_llm_contracts.plugins import Kinds, load_plugin, plugin_paths
from implicit_llm_contracts.runs import logs, signals
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.run_directory import is_done, work_directory
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_workflow.commands.options import OptionError, field_options, given, option_of, with_options
from implicit_llm_workflow.launching.launch import launch
from implicit_llm_workflow.launching.preflight import Preflight
from implicit_llm_workflow.planning.code_digest import STAGES, require_submitted_code, stage_module

# The runtime options of `implicit-llm job` that each stage uses; the command refuses the others of JobRuntime.
OPTIONS_OF_JOB = {
    "data": ("threads", "downloads"),
    "checkpoint": ("downloads",),
    "evaluate": ("threads", "device", "batch_size", "kernels"),
    "report": (),
    "excerpt": (),
}


RunDir = Annotated[Path, typer.Option(help="Run directory of the job; it writes nowhere else.", metavar="DIR")]
IdentityText = Annotated[
    str,
    typer.Option(
        "--identity",
        help="The identity of the result and the run directories of its inputs, as JSON, or @FILE. "
        "`implicit-llm explain --identity` prints it.",
        metavar="JSON",
    ),
]
Log = Annotated[Path | None, typer.Option(help="File to which the log is appended, besides stderr.", metavar="FILE")]
MACHINE_PANEL = "Use of the machine"
MACHINE = {
    "threads": "CPU threads; 0 leaves their number to the libraries.",
    "device": "Where the model runs.",
    "kernels": "Kernels to use.",
}
EVALUATION = MACHINE | {"batch_size": "Sequences at a time; 0 takes the default."}
TRAINING = {
    MACHINE_PANEL: MACHINE
    | {
        "micro_batch_size": "Sequences of one forward pass; 0 takes the whole batch at once.",
        "gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time.",
        "shard_optimizer": "Each process keeps a part of AdamW's moments: less memory, more communication.",
        "cuda_graphs": "On a GPU, start all kernels of a training pass in one call; the numbers are the same.",
    },
    "Checkpoints and stops": {
        "save_every_s": "Seconds between checkpoints; more where training would wait for over 2 % of the time.",
        "save_steps": "Steps between further checkpoints; 0 saves by time alone.",
        "grace_s": "Seconds from the stop signal to the kill; the log warns if a save may come too late.",
        "hang_s": "Write the stacks and end the job after this time without progress; 0 waits forever.",
    },
    "Progress": {
        "log_every_steps": "Steps between points of the journal.",
        "progress": "Log lines at growing intervals, or a bar.",
    },
}


@dataclass(frozen=True)
class JobRuntime:
    """The runtime settings of a job that does not train; they are not part of its identity."""

    threads: Count | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    kernels: Kernels | None = None
    batch_size: Count | None = None
    downloads: Path | None = None


def run_job(
    run_dir: Path, identity: str, log: Path | None, runtime: dict[str, Any], *, is_training: bool = False
) -> None:
    """Run a job with the function of its stage; `runtime`: the values of the runtime options by field.

    `identity`: JSON or @FILE, from the command line. `is_training`: whether the command is `train`. The call sets
    environment variables of libraries and installs a handler for SIGUSR2. Raises: UserError, and all exceptions of the
    stage.
    """
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # a process of a launcher starts with the signal ignored
        # Training replaces this handler; other jobs exit and resume from their finished parts.
        signals.handle(signal.SIGUSR2, lambda number, frame: sys.exit(Preempted.exit_code))
    # Compute nodes often have no internet, and each request to the hub would wait for a timeout. All needed files were
    # fetched before. Set HF_HUB_OFFLINE=0 to use the hub inside jobs.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from implicit_llm_jobs.stage import StageRequest, logged, run_stage

    wanted, inputs = Identity.read(identity)
    stage, config = wanted.stage, wanted.config
    if (stage == "train") != is_training:
        command = "job" if is_training else "train"
        raise OptionError(f"--identity: is that of a job of the stage {stage}; type `implicit-llm {command}`")
    if idle := [name for name in runtime if name not in OPTIONS_OF_JOB.get(stage, runtime)]:
        raise OptionError(f"{option_of(idle[0])}: does nothing in a job of the stage {stage}; remove it")
    if stage == "data" and "threads" in runtime:
        os.environ["RAYON_NUM_THREADS"] = str(runtime["threads"])  # the tokenizers use Rayon's threads
    kinds = Kinds.read(plugin_paths(config), f"{stage}/{wanted.name}")
    # A finished result is only shown again; it may have been accepted although its code changed.
    was_done = is_done(work_directory(run_dir, wanted.fingerprint))
    with logged(run_dir, log):
        for plugin in kinds.plugins:
            load_plugin(Path(plugin))
        name = stage_module(stage, config, kinds) if stage in STAGES else None
        if name is None or importlib.util.find_spec(name) is None:
            raise OptionError(f"--identity: there is no job of stage {stage} and kind {config.get('kind')}")
        module = importlib.import_module(name)
        run = kinds.function(stage, config.get("kind", "")) or module.run
        check_code = partial(require_submitted_code, name, wanted.code, f"{stage}/{wanted.name}", tuple(kinds.plugins))
        if not was_done:
            check_code()

    def body(context: StageContext) -> StageResult:
        if was_done:  # a file of the result is damaged, so it is made again
            check_code()
        return run(context)

    reads = _reads_of_evaluation if stage == "evaluate" else getattr(module, "reads_of_inputs", None)
    request = StageRequest(run_dir, wanted, inputs, runtime, log, reads=reads)
    run_stage(request, body)


def _reads_of_evaluation(path: PurePosixPath) -> bool:
    """Return whether an evaluation reads this file; it does not read the checkpoints from which training resumes.

    These checkpoints are three times the size of the model and may have been deleted to save space.
    """
    return {"checkpoint", "kept"}.isdisjoint(path.parts)


def job(
    run_dir: RunDir,
    identity: IdentityText,
    log: Log = None,
    **values: Any,
) -> None:
    """Run one job of an experiment, as the rules do: make data, import or evaluate a model, or make the report.

    The identity defines the job. An interrupted job resumes. Training has its own command, `implicit-llm train`. Data
    jobs use --threads and --downloads, imports --downloads. Evaluations use --threads, --device, --batch-size and
    --kernels. The command refuses an option that the job does not use.

    **Example**

        implicit-llm explain demo data/a5-train --identity > id.json
        implicit-llm job --run-dir results/demo/data/a5-train --identity @id.json
        implicit-llm explain mine.yaml checkpoint/pythia-70m --identity > id.json
        implicit-llm job --identity @id.json \\
            --run-dir results/mine/checkpoint/pythia-70m
    """
    run_job(run_dir, identity, log, given(JobRuntime, values))


DOWNLOADS = {"downloads": "Folder of fetched files; else $IMPLICIT_LLM_DATA, else results/downloads."}
with_options(
    job, field_options(JobRuntime, EVALUATION, MACHINE_PANEL) | field_options(JobRuntime, DOWNLOADS, "Options")
)


def train(
    run_dir: RunDir,
    identity: IdentityText,
    log: Log = None,
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
    **values: Any,
) -> None:
    """Train one phase of a curriculum; a later phase starts from a checkpoint of an earlier one.

    An interrupted job resumes from its last checkpoint, with the same result. Ctrl-C, SIGTERM and SIGUSR2 end it with
    exit code 75 after a checkpoint; a second Ctrl-C ends it at once.

    **Example**

        implicit-llm explain demo train/a5-implicit-s1/unrolled \\
            --identity > id.json
        implicit-llm train --run-dir results/demo/train/a5-implicit-s1/unrolled \\
            --identity @id.json
    """
    runtime = given(Runtime, values)
    if threads := runtime.get("threads", 0):
        runtime["threads"] = max(1, threads // processes_per_node)
    if nodes * processes_per_node > 1 and "RANK" not in os.environ:  # this process starts the workers
        worker = ("-m", "implicit_llm_workflow.console", *sys.argv[1:])
        launch(nodes, processes_per_node, run_dir, worker, threads // processes_per_node)
        return
    run_job(run_dir, identity, log, runtime, is_training=True)


for _panel, _sentences in TRAINING.items():
    with_options(train, field_options(Runtime, _sentences, _panel))


def preflight(
    report: Annotated[Path | None, typer.Option(help="JSON file for what was found.", metavar="FILE")] = None,
    **values: Any,
) -> None:
    """Check in seconds that this machine can run the jobs of a hardware class: driver, kernels, disk.

    It stops at the first failed check, with one line that names the fix. The failure class is `env`.

    **Example**

        srun --partition=h100 --gpus=1 \\
            implicit-llm preflight --hardware h100 --device cuda
    """
    with logs.configured(None):
        found = Preflight(**given(Preflight, values)).run()
    if report is not None:
        write_json(report, found)


PREFLIGHT = {
    "hardware": "Name of the hardware class, for messages.",
    "results": "Folder in which results must be writable.",
    "device": MACHINE["device"],
    "kernels": MACHINE["kernels"],
    "checkpoint_bytes": "Size of the largest checkpoint.",
}
with_options(preflight, field_options(Preflight, PREFLIGHT, "Options"))
