"""How many sequences are evaluated at a time, and what happens when they do not fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from implicit_llm_contracts.runs.errors import UserError

log = logging.getLogger(__name__)


class EvaluationOutOfMemory(UserError):
    """Not even the smallest allowed batch fits."""


@dataclass
class BatchSize:
    """Sequences per batch: halved and remembered when memory runs out, unless the number belongs to the result."""

    size: int
    is_fixed: bool = False

    def halve(self, where: str, cause: BaseException) -> None:
        """Raises: EvaluationOutOfMemory when there is nothing left to halve."""
        if self.is_fixed:
            raise EvaluationOutOfMemory(
                f"{where}: out of memory at batch size {self.size}, which belongs to this mode's stopping rule; "
                "set a smaller batch_size for the mode in the evaluation config, or use a device with more memory"
            ) from cause
        if self.size == 1:
            raise EvaluationOutOfMemory(
                f"{where}: out of memory with a single sequence; use a device with more memory"
            ) from cause
        self.size //= 2
        log.warning("%s: out of memory, going on with batches of %d sequences", where, self.size)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this is an accelerator's or the CPU allocator's refusal (the latter is a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Give back what the failed attempt left in the allocator's cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
