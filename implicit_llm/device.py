"""Choose the device and the kernels with which a job computes."""

import torch
from transformers.utils import logging

from implicit_llm.kernels.selection import KernelChoice, select_kernels_for
from implicit_llm_contracts.errors import UserError


class NoGpu(UserError):
    """A GPU was requested, but there is none."""


def choose_device(wanted: str) -> str:
    """Return "cpu" or "cuda"; "auto" chooses a GPU if there is one. Raises: NoGpu for "cuda" without a GPU."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise NoGpu("device: cuda was asked for and PyTorch finds no GPU; use --device auto or cpu")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def set_up_torch(device: str = "auto", kernels: KernelChoice = "auto", threads: int | None = None) -> str:
    """Choose the device, set kernels and CPU threads of the process, and turn off transformers' progress bars.

    threads: None keeps PyTorch's default number.
    Returns: "cpu" or "cuda". Raises: NoGpu, KernelsUnavailable.
    """
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = choose_device(device)
    select_kernels_for(chosen, kernels)
    return chosen
