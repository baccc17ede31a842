"""The fused head against its logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from implicit_llm.kernels import linear_cross_entropy as module
from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from tests.unit.kernels.reference import relative_error

IGNORED = -100


def make_inputs(dtype: torch.dtype, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(vocab, (23,))
    labels[::5] = IGNORED
    return torch.randn(23, 8, dtype=dtype).requires_grad_(), torch.randn(vocab, 8, dtype=dtype).requires_grad_(), labels


def by_logits(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED, reduction="sum")


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, labels = make_inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, IGNORED), (hidden, weight))


@pytest.mark.parametrize("slice_tokens", [4, 23, 4096])
@pytest.mark.parametrize("vocab", [37, 64, 128])
def test_loss_and_gradients_equal_those_of_the_logits_for_every_slice_and_width(
    slice_tokens: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_TOKENS", slice_tokens)
    hidden, weight, labels = make_inputs(torch.float64, vocab)
    loss, expected = linear_cross_entropy(hidden, weight, labels, IGNORED), by_logits(hidden, weight, labels)
    found = torch.autograd.grad(0.3 * loss, (hidden, weight))
    wanted = torch.autograd.grad(0.3 * expected, (hidden, weight))
    assert relative_error(loss, expected) < 1e-14
    assert all(relative_error(mine, other) < 1e-13 for mine, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradients_of_the_fp32_weight_are_fp32_and_close(dtype: torch.dtype) -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, labels, IGNORED)
    found = torch.autograd.grad(loss, (hidden, weight))
    wanted = torch.autograd.grad(by_logits(hidden.double(), weight.double(), labels), (hidden, weight))
    assert loss.dtype == found[1].dtype == torch.float32
    assert all(relative_error(mine, other) < 2e-2 for mine, other in zip(found, wanted, strict=True))


def test_tokens_without_a_label_count_nothing() -> None:
    hidden, weight, labels = make_inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), IGNORED)
    assert loss == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, labels = make_inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight.detach(), labels, IGNORED)
    expected = torch.autograd.grad(by_logits(hidden, weight, labels), hidden)[0]
    assert relative_error(torch.autograd.grad(loss, hidden)[0], expected) < 1e-13
