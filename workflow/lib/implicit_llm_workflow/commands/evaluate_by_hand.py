"""Evaluate a model manually, as a job of its own: the same call finds its result again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.plugins import KEY as PLUGINS
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.run_directory import METRICS
from implicit_llm_workflow.commands.jobs import BatchSize, Device, Job, Kernels, Log, Threads, run_job
from implicit_llm_workflow.commands.options import OptionError
from implicit_llm_workflow.file_digests import CONFIG_FILE, FileDigests, safe_digests
from implicit_llm_workflow.planning.code_digest import job_code, job_digest

ROOT = Path("results") / "by-hand"
SHOWN_DIGITS = 8
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Given:
    """The options that every kind of evaluation has."""

    model: Annotated[
        Path,
        typer.Option(
            help="Run directory of a training phase, or any checkpoint: of transformers (config.json and safetensors), "
            "in the published layout, or of the original Mamba2 release.",
            metavar="DIR",
        ),
    ]
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Run directory of a data set. Repeatable.", metavar="DIR"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory of the evaluation; else below results/by-hand/.", metavar="DIR"),
    ] = None
    sha256: Annotated[
        list[str] | None,
        typer.Option(
            "--sha256",
            help="Digest that a file of the checkpoint must have. A pytorch_model.bin is read only if named here.",
            metavar="FILE=DIGEST",
        ),
    ] = None
    log: Log = None
    threads: Threads = 0
    device: Device = "auto"
    batch_size: BatchSize = 0
    kernels: Kernels = "auto"

    @property
    def runtime(self) -> dict[str, Any]:
        """Runtime options of the job, which are not part of its identity."""
        options = {"threads": self.threads or None, "batch_size": self.batch_size or None}
        return {**options, "device": self.device, "kernels": self.kernels}


def evaluate_by_hand(name: str, config: dict[str, Any], given: Given) -> None:
    """Import the model if it is none of ours, evaluate it, print the numbers. Raises: UserError."""
    command, kind = name.replace("_", "-"), EVALUATION_KINDS[name]
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{ROOT.parent.resolve() / 'mlflow.db'}")
    test_sets = _test_sets(command, kind.reads, given.data or [])
    if kind.lengths == "all" and "lengths" not in config:
        config["lengths"] = sorted({data.config["length"] for _, data in test_sets.values()})
    if kind.lengths != "shortest":  # which the job takes from the data
        fill(kind.config, config, f"evaluate {command}")
    model_dir, model = _model(given)
    upstream = {"model": model.fingerprint, **{role: data.fingerprint for role, (_, data) in test_sets.items()}}
    if PLUGINS in model.config:
        config[PLUGINS] = model.config[PLUGINS]
    code = job_digest(job_code("evaluate", config, model.config.get("model")))
    identity = Identity("evaluate", f"{model.name}/{command}", config, code, upstream)
    identity = replace(identity, name=f"{identity.name}-{identity.fingerprint[:SHOWN_DIGITS]}")
    run_dir = given.out or ROOT / "evaluate" / identity.name
    inputs = [f"model={model_dir}", *(f"{role}={folder}" for role, (folder, _) in test_sets.items())]
    run_job(Job(run_dir, identity.to_json(), inputs, given.log, given.runtime))
    _show(run_dir, kind.columns)


def _test_sets(
    command: str, reads: tuple[str, ...], folders: list[Path] | tuple[()]
) -> dict[str, tuple[Path, Manifest]]:
    """Folder and manifest by role, which is what the data set is called. Raises: UserError."""
    kinds = " or ".join(reads)
    if not folders and reads != (TOKENIZER,):
        raise OptionError(f"--data: is missing; add the run directory of a data set of kind {kinds}")
    found: dict[str, tuple[Path, Manifest]] = {}
    for folder in folders:
        data = Manifest.read(folder / MANIFEST)
        kind = data.config.get("kind")
        if data.stage != "data" or kind not in reads:
            raise OptionError(
                f"--data {folder}: is of kind {kind or data.stage}, and {command} reads {kinds}; give the run "
                "directory of such a data set"
            )
        role = TOKENIZER if kind == TOKENIZER else data.name
        if role in found:
            raise OptionError(f"--data {folder}: a data set called {role} is given already; remove one")
        found[role] = folder, data
    return found


def _model(given: Given) -> tuple[Path, Manifest]:
    """A run of ours, or the checkpoint imported into one. Raises: UserError."""
    folder = given.model
    if (folder / MANIFEST).is_file():
        run = Manifest.read(folder / MANIFEST)
        if run.stage not in ("train", "checkpoint"):
            raise OptionError(
                f"--model {folder}: is the run directory of {run.stage}/{run.name}, which has no model; give that of a "
                "training phase or of an imported checkpoint"
            )
        return folder, run
    if not (folder / CONFIG_FILE).is_file():
        raise OptionError(
            f"--model {folder}: has neither {MANIFEST} nor {CONFIG_FILE}; give the run directory of a training phase, "
            "or the folder of a checkpoint"
        )
    path = folder.resolve()
    digests = safe_digests(path, FileDigests(ROOT / ".digests.json")) | dict(map(_digest, given.sha256 or ()))
    config = {"path": str(path), "sha256": digests}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip(".-") or "checkpoint"
    identity = Identity("checkpoint", name, config, job_digest(job_code("checkpoint", config)), {})
    run_dir = ROOT / "checkpoint" / name
    run_job(Job(run_dir, identity.to_json(), None, given.log, {"downloads": downloads_folder()}))
    return run_dir, Manifest.read(run_dir / MANIFEST)


def _digest(option: str) -> tuple[str, str]:
    name, _, digest = option.partition("=")
    if not name or not re.fullmatch("[0-9a-f]{64}", digest):
        raise OptionError(f"--sha256 {option}: must have the form FILE=DIGEST, with 64 hexadecimal digits")
    return name, digest


def _show(run_dir: Path, columns: Mapping[str, str]) -> None:
    """Print the numbers, a line for each record, and the path of their file."""
    from rich.table import Table

    from implicit_llm_workflow.commands import options

    files = (record.path for record in Manifest.read(run_dir / MANIFEST).files)
    path = run_dir / next(file for file in files if file.rpartition("/")[2] == METRICS)
    table = Table("data", "mode", "length", box=None, pad_edge=False)
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for record in json.loads(path.read_bytes())["records"]:
        table.add_row(*(_text(record.get(key)) for key in ("data", "mode", "length", *columns)))
    console = options.wide_console()
    console.print(table)
    console.print(str(path), soft_wrap=True)


def _text(value: Any) -> str:
    """What is not known is a dash, never a zero."""
    from implicit_llm_workflow.results.text import number_text

    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return value if isinstance(value, str) else number_text(value, 5)
