"""Evaluating a model that is in no experiment: as a job of its own, so that asked again it is there already."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EvaluationKind
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_workflow.commands.job import Job, OptionError, run_job
from implicit_llm_workflow.file_digests import CONFIG_FILE, FileDigests, safe_digests
from implicit_llm_workflow.planning.code_digest import job_code, job_digest
from implicit_llm_workflow.planning.recorded import METRICS

ROOT = Path("results") / "by-hand"
SHOWN_DIGITS = 8
MODEL_STAGES = ("train", "checkpoint")
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class ByHand:
    """What was asked for. `config`: of the evaluation, as an experiment's job has it."""

    command: str
    config: Mapping[str, Any]
    kind: EvaluationKind
    model: Path
    data: tuple[Path, ...]
    out: Path | None
    sha256: tuple[str, ...]
    log: Path | None
    runtime: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A run directory with what its manifest says."""

    dir: Path
    stage: str
    name: str
    fingerprint: str
    config: Mapping[str, Any]
    files: tuple[str, ...]


def evaluate_by_hand(asked: ByHand) -> None:
    """Import the model if it is none of ours, evaluate it, print the numbers. Raises: UserError."""
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{ROOT.parent.resolve() / 'mlflow.db'}")
    test_sets = _test_sets(asked)
    config = _with_lengths(asked, test_sets)
    model = _model(asked)
    upstream = {"model": model.fingerprint, **{role: run.fingerprint for role, run in test_sets.items()}}
    code = job_digest(job_code("evaluate", config, model.config.get("model")))
    identity = Identity("evaluate", f"{model.name}/{asked.command}", config, code, upstream)
    identity = replace(identity, name=f"{identity.name}-{identity.fingerprint[:SHOWN_DIGITS]}")
    run_dir = asked.out or ROOT / "evaluate" / identity.name
    inputs = [f"model={model.dir}", *(f"{role}={run.dir}" for role, run in test_sets.items())]
    run_job(Job("evaluate", run_dir, identity.to_json(), inputs, asked.log, asked.runtime))
    _show(_finished(run_dir), asked.kind.columns)


def _test_sets(asked: ByHand) -> dict[str, Finished]:
    """By role, which is what the data set is called. Raises: OptionError."""
    if not asked.data and asked.kind.reads != (TOKENIZER,):
        raise OptionError(
            f"--data: is missing; add the run directory of a data set of kind {' or '.join(asked.kind.reads)}"
        )
    found: dict[str, Finished] = {}
    for folder in asked.data:
        run = _finished(folder)
        kind = run.config.get("kind")
        if run.stage != "data" or kind not in asked.kind.reads:
            raise OptionError(
                f"--data {folder}: is of kind {kind or run.stage}, and {asked.command} reads "
                f"{' or '.join(asked.kind.reads)}; give the run directory of such a data set"
            )
        role = TOKENIZER if kind == TOKENIZER else run.name
        if role in found:
            raise OptionError(f"--data {folder}: a data set called {role} is given already; remove one")
        found[role] = run
    return found


def _with_lengths(asked: ByHand, test_sets: Mapping[str, Finished]) -> dict[str, Any]:
    """The config; where all lengths are wanted and none is named, those that the streams were made for."""
    lengths = sorted({run.config["length"] for run in test_sets.values()}) if asked.kind.lengths == "all" else None
    return {**({} if lengths is None else {"lengths": lengths}), **asked.config}


def _model(asked: ByHand) -> Finished:
    """A run of ours, or the checkpoint imported into one. Raises: OptionError."""
    folder = asked.model
    if (folder / MANIFEST).is_file():
        run = _finished(folder)
        if run.stage not in MODEL_STAGES:
            raise OptionError(
                f"--model {folder}: is the run directory of {run.stage}/{run.name}, which has no model; give that of a "
                "training phase or of an imported checkpoint"
            )
        return run
    if not (folder / CONFIG_FILE).is_file():
        raise OptionError(
            f"--model {folder}: has neither {MANIFEST} nor {CONFIG_FILE}; give the run directory of a training phase, "
            "or the folder of a checkpoint"
        )
    path = folder.resolve()
    digests = safe_digests(path, FileDigests(ROOT / ".digests.json")) | _given_digests(asked.sha256)
    config = {"path": str(path), "sha256": digests}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip(".-") or "checkpoint"
    identity = Identity("checkpoint", name, config, job_digest(job_code("checkpoint", config)), {})
    run_dir = ROOT / "checkpoint" / name
    runtime = {"downloads": downloads_folder()}
    run_job(Job("checkpoint", run_dir, identity.to_json(), None, asked.log, runtime))
    return _finished(run_dir)


def _given_digests(options: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for option in options:
        name, _, digest = option.partition("=")
        if not name or not re.fullmatch("[0-9a-f]{64}", digest):
            raise OptionError(f"--sha256 {option}: must have the form FILE=DIGEST, with 64 hexadecimal digits")
        found[name] = digest
    return found


def _finished(folder: Path) -> Finished:
    """Raises: ManifestError."""
    found = Manifest.read(folder / MANIFEST)
    files = tuple(record.path for record in found.files)
    return Finished(folder, found.stage, found.name, found.fingerprint, found.config, files)


def _show(run: Finished, columns: Mapping[str, str]) -> None:
    """The numbers, a line for each record, and where they lie."""
    from rich.table import Table

    from implicit_llm_workflow.commands import options

    path = run.dir / next(file for file in run.files if file.rpartition("/")[2] == METRICS)
    table = Table("data", "mode", "length", box=None, pad_edge=False)
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for record in json.loads(path.read_bytes())["records"]:
        shown = [_text(record.get(key)) for key in ("data", "mode", "length", *columns)]
        table.add_row(*shown)
    console = options.wide_console()
    console.print(table)
    console.print(str(path), soft_wrap=True)


def _text(value: Any) -> str:
    """What is not known is a dash, never a zero."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
