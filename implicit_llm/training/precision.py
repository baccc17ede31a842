"""Mixed precision: what autocast computes in, and the scaling that keeps fp16 gradients from vanishing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The scale starts at 2**16 and halves with each overflow. After so many in a row it is below any that could help.
MAX_SKIPPED_IN_A_ROW = 24


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Context in which matrix products are done in `precision`.

    Not left to Accelerate: on a CPU it takes fp16 for fp32 without a word, and its own context copies the logits.
    """
    dtype = _DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def make_scaler(device: str, precision: str) -> torch.amp.GradScaler | None:
    """Loss scaling for fp16, None otherwise."""
    return torch.amp.GradScaler(device) if precision == "fp16" else None


def scaler_values(scaler: torch.amp.GradScaler | None) -> dict[str, float] | None:
    """The scaler's state as JSON values: scales are powers of two, so nothing is rounded."""
    return None if scaler is None else {str(key): value for key, value in scaler.state_dict().items()}


def load_scaler(scaler: torch.amp.GradScaler | None, values: Mapping[str, Any] | None) -> None:
    """Go on with the scale of a checkpoint; one without a scale (of another precision) leaves the initial one."""
    if scaler is not None and values is not None:
        scaler.load_state_dict(dict(values))
