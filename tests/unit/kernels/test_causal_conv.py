"""The plain causal convolution against a sum over its inputs, position by position."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from implicit_llm.kernels.causal_conv import causal_conv
from implicit_llm.kernels.operations import causal_conv as causal_conv_with_state
from tests.unit.kernels.reference import relative_error, sequential_conv


def make_inputs(batch: int, length: int, channels: int, width: int, dtype: torch.dtype = torch.float64):
    """x (B, L, C), weight (C, K), bias (C), initial inputs (B, K-1, C), all with gradients."""
    torch.manual_seed(0)
    shapes = ((batch, length, channels), (channels, width), (channels,), (batch, width - 1, channels))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (2, 2, 6, 4), (3, 33, 10, 4), (2, 9, 8, 2), (2, 5, 3, 1)], ids=str)
def test_outputs_and_gradients_equal_the_sum(sizes, silu, has_initial, dtype, tolerance) -> None:
    tensors = make_inputs(*sizes, dtype=dtype)
    tensors = tensors if has_initial else tensors[:3]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y = causal_conv(*tensors, silu=silu)
    expected = sequential_conv(*exact, *([] if has_initial else [None]))
    expected = F.silu(expected) if silu else expected
    assert y.dtype == dtype
    assert relative_error(y, expected) < tolerance
    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(y, tensors, grad.to(dtype), allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, grad, allow_unused=True)
    assert all(relative_error(a, b) < 10 * tolerance for a, b in zip(ours, theirs, strict=True) if b.numel())


def test_gradients_agree_with_finite_differences() -> None:
    tensors = make_inputs(2, 5, 3, 4)
    assert torch.autograd.gradcheck(lambda *t: causal_conv(*t, silu=True), tensors)


@pytest.mark.parametrize("split", [1, 2, 3, 8, 11])
def test_two_halves_with_the_carried_inputs_equal_one_run(split: int) -> None:
    x, weight, bias, initial = make_inputs(2, 12, 6, 4)
    y, state = causal_conv_with_state(x, weight, bias, initial, silu=True, return_state=True)
    first, carried = causal_conv_with_state(x[:, :split], weight, bias, initial, silu=True, return_state=True)
    second, last = causal_conv_with_state(x[:, split:], weight, bias, carried, silu=True, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), y)
    torch.testing.assert_close(last, state, rtol=0, atol=0)
    assert carried.shape == (2, 3, 6)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_the_inputs_carried_from_an_empty_start_are_padded_with_zeros(split: int) -> None:
    x, weight, bias, _ = make_inputs(2, 12, 6, 4)
    y, _ = causal_conv_with_state(x, weight, bias)
    _, carried = causal_conv_with_state(x[:, :split], weight, bias, return_state=True)
    second, _ = causal_conv_with_state(x[:, split:], weight, bias, carried)
    torch.testing.assert_close(second, y[:, split:])


def test_the_carried_inputs_do_not_keep_the_block_alive() -> None:
    x, weight, bias, _ = make_inputs(1, 64, 6, 4)
    _, carried = causal_conv_with_state(x.detach(), weight, bias, return_state=True)
    assert carried.untyped_storage().nbytes() == carried.nbytes
