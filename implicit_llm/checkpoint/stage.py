"""The stage `checkpoint`: a model that was trained elsewhere, imported so that it can be evaluated like one of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.cards.checkpoint_card import checkpoint_card
from implicit_llm.cards.model_card import FILE_NAME as CARD_FILE
from implicit_llm.checkpoint.source import CONFIG_FILE, PICKLE_FILE, Checkpoint, CheckpointConfig, find_checkpoint
from implicit_llm.data.downloads import downloads_folder
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.original_mamba2 import is_original_mamba2, load_original_mamba2
from implicit_llm.models.published_layout import is_published
from implicit_llm.runs.atomic import commit_directory, remove_temporary, storage_errors, temporary_name
from implicit_llm.runs.errors import UserError
from implicit_llm.runs.fill import fill
from implicit_llm.runs.stage import StageContext, StageResult

TRANSFORMERS, PUBLISHED, ORIGINAL = "transformers", "published", "original_mamba2"


class CheckpointLayoutError(UserError):
    """A checkpoint does not make a causal language model."""


def run(context: StageContext) -> StageResult:
    """Write model/ (config.json, safetensors, the tokenizer if there is one, a card).

    Nothing of a checkpoint is executed. One of transformers is copied as it is; other layouts are converted, in fp32.
    Runtime option: downloads. Raises: UserError.
    """
    wanted = fill(CheckpointConfig, context.config, f"checkpoint/{context.name}")
    checkpoint = find_checkpoint(wanted, downloads_folder(context.runtime))
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
            card = checkpoint_card(context, model, checkpoint.about, layout)
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
            return load_original_mamba2(folder, checkpoint.about["sha256"].get(PICKLE_FILE))
        # Weights of another shape are reported with those that are missing, instead of being an error of their own.
        how: dict[str, Any] = {
            "local_files_only": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        if layout == TRANSFORMERS:
            how["use_safetensors"] = True
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    except ModelConfigError as error:
        raise CheckpointLayoutError(f"{folder}: {error}") from error
    except (ValueError, TypeError, OSError, KeyError, SafetensorError) as error:
        raise CheckpointLayoutError(
            f"{folder}: is no causal language model that can be loaded ({' '.join(str(error).split())[:200]}); "
            "give another checkpoint"
        ) from error
    model, loading = loaded
    lost = sorted({*loading["missing_keys"], *(name for name, *_ in loading.get("mismatched_keys") or ())})
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointLayoutError(
            f"{folder}: its weights lack {lost[0]}{more}, as config.json wants it; it would be drawn at random: "
            "give a whole checkpoint of a causal language model"
        )
    return model


def _copy(checkpoint: Checkpoint, names: tuple[str, ...], target: Path) -> None:
    for name in names:
        shutil.copyfile(checkpoint.folder / name, target / name)
