"""The norms with written-out gradients against their formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from implicit_llm.kernels.norm import rms_norm
from tests.unit.kernels.reference import relative_error

EPS = 1e-5


def formula(x, weight, gate=None):
    x = x if gate is None else x * F.silu(gate)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def make_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, gate."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((2, 3, 10), (10,), (2, 3, 10))]


def test_gradients_agree_with_finite_differences() -> None:
    x, weight, gate = make_inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, None, weight, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x, gate, weight: rms_norm(x, gate, weight, EPS), (x, gate, weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_norms_equal_their_formula_in_the_dtype_of_x(is_gated: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, weight, gate = make_inputs(dtype)
    y = rms_norm(x, gate if is_gated else None, weight, EPS)
    expected = formula(x.double(), weight.double(), gate.double() if is_gated else None)
    assert y.dtype == dtype
    assert relative_error(y, expected) < tolerance


def test_fp32_weights_serve_bf16_inputs() -> None:
    x, weight, gate = make_inputs(torch.float32)
    y = rms_norm(x.bfloat16(), gate.bfloat16(), weight, EPS)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)


def test_values_with_and_without_gradient_are_equal_to_the_bit() -> None:
    x, weight, gate = make_inputs(torch.bfloat16)
    with torch.no_grad():
        alone = rms_norm(x, gate, weight, EPS)
    torch.testing.assert_close(alone, rms_norm(x, gate, weight, EPS).detach(), atol=0, rtol=0)
