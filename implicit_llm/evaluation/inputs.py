"""What an evaluation reads: one trained model, and test sets under any other role."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.device import choose_device
from implicit_llm.kernels.selection import select_kernels_for
from implicit_llm.models.loading.foreign import import_package_of
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.identity import run_and_phase
from implicit_llm_contracts.runs.stage_context import Input, StageContext

MODEL_ROLE = "model"
TRAINING_STATE = frozenset({"checkpoint", "kept"})  # folders of a training phase from which a training goes on


class EvaluateInputError(UserError):
    """An input directory is not what an evaluation needs."""


def reads_of_inputs(path: PurePosixPath) -> bool:
    """Whether an evaluation reads this file: not the weights, moments and random states of a training that goes on.

    They are three times the size of the model, and may have been removed to save room.
    """
    return TRAINING_STATE.isdisjoint(path.parts)


def model_input(context: StageContext) -> Input:
    """The training phase to evaluate. Raises: InputMissing."""
    return context.given(MODEL_ROLE)


def data_inputs(context: StageContext) -> dict[str, Input]:
    """Every input but the model, by role. Raises: EvaluateInputError when there is none."""
    found = {role: context.inputs[role] for role in sorted(context.inputs) if role != MODEL_ROLE}
    if not found:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no test data; add --input NAME=DIR with the run directory of a data set"
        )
    return found


CHECKPOINT = "checkpoint"  # the stage that imports models


def load_model(trained: Input, runtime: Mapping[str, Any]) -> Any:
    """The trained model on its device, in fp32 however it was saved; nothing is downloaded or unpickled.

    Runtime options: device (auto, cpu, cuda), threads, kernels (auto, torch, triton).
    Raises: EvaluateInputError, NoGpu, KernelsUnavailable.
    """
    folder = model_directory(trained)
    if runtime.get("threads"):
        torch.set_num_threads(int(runtime["threads"]))
    device = choose_device(runtime.get("device") or "auto")
    select_kernels_for(device, runtime.get("kernels") or "auto")
    transformers_logging.disable_progress_bar()
    import_package_of(trained.manifest.config.get("model") or {})
    how: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    return model.to(device).eval()


def model_directory(trained: Input) -> Path:
    """The folder `model` of a training phase or an imported checkpoint.

    Raises: EvaluateInputError when its manifest names none.
    """
    for record in trained.manifest.files:
        if re.search(r"(^|/)model/config\.json$", record.path):
            return (trained.dir / record.path).parent
    raise EvaluateInputError(
        f"{trained.dir}/manifest.json: names no model/config.json; "
        f"give the run directory of a training phase or a checkpoint as `{MODEL_ROLE}`"
    )


def about_model(model: Any, trained: Input) -> dict[str, Any]:
    """What the report must know of the model to put a number in its place; None where it is not known.

    A model that was trained elsewhere has no seed and the phase "checkpoint"; `source` says where it comes from.
    """
    summary = trained.manifest.summary
    run, phase = run_and_phase(trained.manifest.name, trained.manifest.config)
    is_peer = trained.manifest.stage == CHECKPOINT
    learned_from = summary.get("data") or {}
    return {
        "run": run,
        "phase": CHECKPOINT if is_peer else phase,
        "source": summary.get("source") if is_peer else None,
        "seed": trained.manifest.config.get("seed"),
        "is_implicit": solver_of(model) is not None,
        "model_type": getattr(model.config, "model_type", None),
        "num_layers": getattr(model.config, "num_hidden_layers", None),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_length": learned_from.get("length"),
        "train_tokens": summary.get("tokens"),
        "train_flops": summary.get("flops"),
    }
