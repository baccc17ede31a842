"""Weights in a pickle, of which nothing but tensors is read."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from implicit_llm.models.errors import ModelConfigError


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU; code in the file does not run.

    Raises: ModelConfigError when the file holds anything else, or is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError) as error:
        raise ModelConfigError(
            f"{path}: cannot be read with weights_only: it is damaged, or holds more than tensors; fetch it again, or "
            "give safetensors"
        ) from error
