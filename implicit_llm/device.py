"""The device that a job computes on."""

import torch

from implicit_llm_contracts.runs import UserError


class NoGpu(UserError):
    """A GPU was asked for, and there is none."""


def choose_device(wanted: str) -> str:
    """cpu or cuda; `auto` takes a GPU where there is one. Raises: NoGpu."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise NoGpu("device: cuda was asked for and PyTorch finds no GPU; use --device auto or cpu")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"
