"""Run the stage `checkpoint`: import a model that was trained elsewhere, so that it can be evaluated like one of ours.

The settings name a folder or a model of the hub:

{"path": "models/pythia-70m"}                      in the downloads folder, or else in the working directory
{"hub": "EleutherAI/pythia-70m", "revision": ...}  in models/<owner>/<name>/<revision>/ of the downloads folder, where
                                                   `implicit-llm prefetch` stores it; in main/ if revision is null
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.cards.model_card import FILE_NAME as CARD_FILE
from implicit_llm.cards.model_card import checkpoint_card
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading import load_errors, load_foreign
from implicit_llm.models.mamba2.loading import is_original_mamba2, load_original_mamba2
from implicit_llm.models.published import is_published
from implicit_llm_contracts.config.checkpoint import CheckpointConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import new_directory, read_object
from implicit_llm_contracts.runs.fetched_files import (
    CONFIG_FILE,
    INDEX_FILE,
    OTHER_MODEL_FILES,
    PICKLE_FILE,
    fetched_model,
    weight_files,
)
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import local_folder
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult

TRANSFORMERS, PUBLISHED, ORIGINAL = "transformers", "published", "original_mamba2"


def run(context: StageContext) -> StageResult:
    """Write model/ with config.json, safetensors, a model card and the OTHER_MODEL_FILES that the checkpoint has.

    No code of a checkpoint runs. A checkpoint of transformers is copied unchanged; other layouts are converted to fp32.
    Runtime option: downloads. Raises: UserError.
    """
    checkpoint = find_checkpoint(context.settings(CheckpointConfig), context.downloads)
    layout = layout_of(checkpoint)
    transformers_logging.disable_progress_bar()
    model = _load(checkpoint, layout)
    with new_directory(context.work / "model") as directory:
        copied = [name for name in OTHER_MODEL_FILES if (checkpoint.folder / name).is_file()]
        if layout == TRANSFORMERS:
            copied += [CONFIG_FILE, *checkpoint.weights]
        else:
            model.save_pretrained(directory)
        for name in copied:
            shutil.copyfile(checkpoint.folder / name, directory / name)
        card = checkpoint_card(context.fingerprint, model, checkpoint.about, layout)
        (directory / CARD_FILE).write_text(card, encoding="utf-8")
    num_parameters = model.num_parameters()
    context.log.info("%s: %s, %d parameters", checkpoint.folder, model.config.model_type, num_parameters)
    summary = {"source": dict(checkpoint.about), "layout": layout, "num_parameters": num_parameters}
    return StageResult(["model"], summary | {"model_type": model.config.model_type})


def layout_of(checkpoint: CheckpointFiles) -> str:
    """Return the layout of a checkpoint, which its config.json determines.

    Raises: CheckpointError for an unknown model_type, and for a pickle in the layout of transformers.
    """
    config, path = checkpoint.config, checkpoint.folder / CONFIG_FILE
    if is_original_mamba2(config):
        return ORIGINAL
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: model_type {kind!r} is none of transformers; code that comes with a checkpoint is not run: "
            "give another"
        )
    if is_published(dict(config)) and str(kind).startswith("implicit_"):
        return PUBLISHED
    if PICKLE_FILE in checkpoint.weights:
        raise CheckpointError(
            f"{checkpoint.folder}: only {PICKLE_FILE}, which is read of the original Mamba2 and the published layout "
            "only; save the model with safetensors"
        )
    return TRANSFORMERS


def _load(checkpoint: CheckpointFiles, layout: str) -> Any:
    """Load the model, whose weights must all be in the checkpoint. Raises: CheckpointError."""
    folder = checkpoint.folder
    try:
        if layout == ORIGINAL:
            with load_errors():
                return load_original_mamba2(folder, checkpoint.about["sha256"].get(PICKLE_FILE))
        is_copied = layout == TRANSFORMERS
        return load_foreign(folder, dtype="auto" if is_copied else torch.float32, use_safetensors=is_copied)
    except ModelConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error


class CheckpointError(UserError):
    """A foreign checkpoint is missing, damaged, in an unsupported format, or not a causal language model."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of an existing checkpoint.

    config: the content of config.json. weights: the names of the files with weights. about: the origin, and the sha256
    of config.json and weights.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: list[str]
    about: Mapping[str, Any]


def find_checkpoint(wanted: CheckpointConfig, downloads: Path) -> CheckpointFiles:
    """Find the checkpoint and check the digests that `wanted` names.

    Raises: CheckpointError if files are missing, damaged or changed; FetchedFilesError for an incomplete fetch.
    """
    folder: Path | None
    if wanted.hub is not None:
        folder, commit = fetched_model(wanted.hub, wanted.revision, downloads)
        about: dict[str, Any] = {"hub": wanted.hub, "revision": wanted.revision, "commit": commit}
    else:
        folder, about = local_folder(Path(str(wanted.path)), downloads), {"path": wanted.path}
    if folder is None:
        raise CheckpointError(
            f"checkpoint.path: {wanted.path} is no directory, neither below {downloads} nor below the working "
            "directory; correct the path, or put the checkpoint there"
        )
    config = read_object(folder / CONFIG_FILE)
    if not config:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: is missing or damaged; give the directory of a checkpoint, or fetch it again"
        )
    weights = _weights(folder, wanted)
    digests = {name: sha256_of(folder / name) for name in (CONFIG_FILE, *weights)}
    _compare(folder, wanted.sha256, digests)
    return CheckpointFiles(folder, config, weights, about | {"sha256": digests})


def _weights(folder: Path, wanted: CheckpointConfig) -> list[str]:
    """Return the names of the files with weights, including the index if there are several.

    A pickle counts only if there are no safetensors and the settings have its digest.
    Raises: CheckpointError if weights are missing.
    """
    names, path = weight_files(folder), folder / PICKLE_FILE
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if not missing:
        return names
    if INDEX_FILE in names or not path.is_file():
        raise CheckpointError(f"{folder}: has no {missing[0]}; give a checkpoint in that format, or fetch it again")
    if PICKLE_FILE not in wanted.sha256:
        raise CheckpointError(
            f"{path}: is a pickle; if it comes from whom you trust, name its digest, in the experiment file as "
            f"`checkpoint: {{..., sha256: {{{PICKLE_FILE}: {sha256_of(path)}}}}}`, manually as "
            f"`--sha256 {PICKLE_FILE}={sha256_of(path)}`; only tensors are read from it even then"
        )
    return [PICKLE_FILE]


def _compare(folder: Path, wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, digest in sorted(wanted.items()):
        has = found.get(name) or (sha256_of(folder / name) if (folder / name).is_file() else None)
        if has != digest:
            what = "is not there" if has is None else f"has sha256 {has}"
            raise CheckpointError(
                f"{folder / name}: {what}, expected {digest}; correct checkpoint.sha256, or bring back that file"
            )
