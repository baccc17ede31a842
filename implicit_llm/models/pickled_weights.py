"""Weights in a pickle, of which nothing but tensors is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_llm.models.errors import ModelConfigError


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU; code in the file does not run.

    Raises: ModelConfigError when the file holds anything else, or is damaged; OSError when it cannot be opened.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # KeyError, struct.error, ...: whatever the damaged bytes happen to mean
        raise _refusal(path) from error
    if not _are_weights(weights):
        raise _refusal(path)
    return weights


def _are_weights(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    )


def _refusal(path: Path) -> ModelConfigError:
    return ModelConfigError(
        f"{path}: cannot be read with weights_only: it is damaged, or holds more than tensors by name; fetch it again, "
        "or give safetensors"
    )
