"""Where a job computes: its device, and the kernels for it."""

from __future__ import annotations

import torch

from implicit_llm.kernels.selection import Backend, KernelChoice, select_kernels
from implicit_llm.runs.errors import UserError


class NoGpu(UserError):
    """A GPU was asked for, and there is none."""


def choose_device(wanted: str) -> str:
    """cpu or cuda; `auto` takes a GPU where there is one. Raises: NoGpu."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise NoGpu("device: cuda was asked for and PyTorch finds no GPU; use --device auto or cpu")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def select_kernels_for(device: str, choice: KernelChoice) -> Backend:
    """Decide for the whole process; `auto` means torch on the CPU, also beside a GPU. Raises: KernelsUnavailable."""
    return select_kernels("torch" if device == "cpu" and choice == "auto" else choice)
