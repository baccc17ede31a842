"""The stage `checkpoint`: a model that was trained elsewhere, imported so that it can be evaluated like one of ours."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.cards.model_card import FILE_NAME as CARD_FILE
from implicit_llm.cards.model_card import checkpoint_card
from implicit_llm.checkpoint.source import CONFIG_FILE, PICKLE_FILE, Checkpoint, CheckpointConfig, find_checkpoint
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading.foreign import load_errors, load_foreign
from implicit_llm.models.loading.original_mamba2 import is_original_mamba2, load_original_mamba2
from implicit_llm.models.published import is_published
from implicit_llm_contracts.runs import (
    StageContext,
    StageResult,
    UserError,
    commit_directory,
    downloads_folder,
    fill,
    remove_temporary,
    storage_errors,
    temporary_name,
)

TRANSFORMERS, PUBLISHED, ORIGINAL = "transformers", "published", "original_mamba2"


class CheckpointLayoutError(UserError):
    """A checkpoint does not make a causal language model."""


def run(context: StageContext) -> StageResult:
    """Write model/ (config.json, safetensors, the tokenizer if there is one, a card).

    Nothing of a checkpoint is executed. One of transformers is copied as it is; other layouts are converted, in fp32.
    Runtime option: downloads. Raises: UserError.
    """
    wanted = fill(CheckpointConfig, context.config, f"checkpoint/{context.name}")
    checkpoint = find_checkpoint(wanted, downloads_folder(context.runtime.get("downloads")))
    layout = layout_of(checkpoint)
    transformers_logging.disable_progress_bar()
    model = _load(checkpoint, layout)
    target = context.work / "model"
    tmp = temporary_name(target)
    try:
        with storage_errors(target):
            tmp.mkdir()
            if layout == TRANSFORMERS:
                _copy(checkpoint, (CONFIG_FILE, *checkpoint.weights), tmp)
            else:
                model.save_pretrained(tmp)
            _copy(checkpoint, checkpoint.others, tmp)
            card = checkpoint_card(context.fingerprint, model, checkpoint.about, layout)
            (tmp / CARD_FILE).write_text(card, encoding="utf-8")
        commit_directory(tmp, target)
    finally:
        remove_temporary(tmp)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    context.log.info("%s: %s, %d parameters", checkpoint.folder, model.config.model_type, num_parameters)
    summary = {"source": dict(checkpoint.about), "layout": layout, "num_parameters": num_parameters}
    return StageResult(["model"], summary | {"model_type": model.config.model_type})


def layout_of(checkpoint: Checkpoint) -> str:
    """Whose format the config.json has. Raises: CheckpointLayoutError."""
    config, path = checkpoint.config, checkpoint.folder / CONFIG_FILE
    if is_original_mamba2(config):
        return ORIGINAL
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise CheckpointLayoutError(
            f"{path}: model_type {kind!r} is none of transformers; code that comes with a checkpoint is not run: "
            "give another"
        )
    if is_published(dict(config)) and str(kind).startswith("implicit_"):
        return PUBLISHED
    if PICKLE_FILE in checkpoint.weights:
        raise CheckpointLayoutError(
            f"{checkpoint.folder}: only {PICKLE_FILE}, which is read of the original Mamba2 and the published layout "
            "only; save the model with safetensors"
        )
    return TRANSFORMERS


def _load(checkpoint: Checkpoint, layout: str) -> Any:
    """The model, every weight of which came from the checkpoint. Raises: CheckpointLayoutError."""
    folder = checkpoint.folder
    try:
        if layout == ORIGINAL:
            with load_errors():
                return load_original_mamba2(folder, checkpoint.about["sha256"].get(PICKLE_FILE))
        is_copied = layout == TRANSFORMERS
        return load_foreign(folder, dtype="auto" if is_copied else torch.float32, use_safetensors=is_copied)
    except ModelConfigError as error:
        raise CheckpointLayoutError(f"{folder}: {error}") from error


def _copy(checkpoint: Checkpoint, names: tuple[str, ...], target: Path) -> None:
    for name in names:
        shutil.copyfile(checkpoint.folder / name, target / name)
