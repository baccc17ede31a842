"""Run every test on a GPU with Triton kernels and TF32 products, unless the test selects others."""

from collections.abc import Iterator

import pytest
import torch

from implicit_llm.kernels.selection import kernels


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    if not torch.cuda.is_available():  # the tests skip themselves
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with kernels("triton"):
        yield
    torch.set_float32_matmul_precision(before)
