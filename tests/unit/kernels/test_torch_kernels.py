"""The plain convolution, norms and head of the loss against slow references."""

import pytest
import torch
from torch.nn import functional as F

from implicit_llm.kernels import linear_cross_entropy as module
from implicit_llm.kernels.causal_conv import causal_conv
from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.kernels.norm import rms_norm
from implicit_llm.kernels.operations import causal_conv as causal_conv_with_state
from tests.unit.kernels.reference import relative_error, sequential_conv


def conv_inputs(batch: int, length: int, channels: int, width: int, dtype: torch.dtype = torch.float64):
    """x (B, L, C), weight (C, K), bias (C), initial inputs (B, K-1, C), all with gradients."""
    torch.manual_seed(0)
    shapes = ((batch, length, channels), (channels, width), (channels,), (batch, width - 1, channels))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (2, 2, 6, 4), (3, 33, 10, 4), (2, 9, 8, 2), (2, 5, 3, 1)], ids=str)
def test_outputs_and_gradients_equal_the_sum(sizes, silu, has_initial, dtype, tolerance) -> None:
    tensors = conv_inputs(*sizes, dtype=dtype)
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


def test_gradients_of_the_convolution_agree_with_finite_differences() -> None:
    tensors = conv_inputs(2, 5, 3, 4)
    assert torch.autograd.gradcheck(lambda *t: causal_conv(*t, silu=True), tensors)


@pytest.mark.parametrize("split", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("has_initial", [True, False])
def test_two_halves_with_the_carried_inputs_equal_one_run(split: int, has_initial: bool) -> None:
    x, weight, bias, given = conv_inputs(2, 12, 6, 4)
    initial = given if has_initial else None  # an empty start is padded with zeros
    y, state = causal_conv_with_state(x, weight, bias, initial, silu=True, return_state=True)
    first, carried = causal_conv_with_state(x[:, :split], weight, bias, initial, silu=True, return_state=True)
    second, last = causal_conv_with_state(x[:, split:], weight, bias, carried, silu=True, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), y)
    torch.testing.assert_close(last, state, rtol=0, atol=0)
    assert carried.shape == (2, 3, 6)


def test_the_carried_inputs_do_not_keep_the_block_alive() -> None:
    x, weight, bias, _ = conv_inputs(1, 64, 6, 4)
    _, carried = causal_conv_with_state(x.detach(), weight, bias, return_state=True)
    assert carried.untyped_storage().nbytes() == carried.nbytes


IGNORED = -100


def head_inputs(dtype: torch.dtype, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(vocab, (23,))
    labels[::5] = IGNORED
    return torch.randn(23, 8, dtype=dtype).requires_grad_(), torch.randn(vocab, 8, dtype=dtype).requires_grad_(), labels


def by_logits(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED, reduction="sum")


def test_gradients_of_the_fused_head_agree_with_finite_differences() -> None:
    hidden, weight, labels = head_inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, IGNORED), (hidden, weight))


@pytest.mark.parametrize("slice_tokens", [4, 23, 4096])
@pytest.mark.parametrize("vocab", [37, 64, 128])
def test_loss_and_gradients_equal_those_of_the_logits_for_every_slice_and_width(
    slice_tokens: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_TOKENS", slice_tokens)
    hidden, weight, labels = head_inputs(torch.float64, vocab)
    loss, expected = linear_cross_entropy(hidden, weight, labels, IGNORED), by_logits(hidden, weight, labels)
    found = torch.autograd.grad(0.3 * loss, (hidden, weight))
    wanted = torch.autograd.grad(0.3 * expected, (hidden, weight))
    assert relative_error(loss, expected) < 1e-14
    assert all(relative_error(mine, other) < 1e-13 for mine, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradients_of_the_fp32_weight_are_fp32_and_close(dtype: torch.dtype) -> None:
    hidden, weight, labels = head_inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, labels, IGNORED)
    found = torch.autograd.grad(loss, (hidden, weight))
    wanted = torch.autograd.grad(by_logits(hidden.double(), weight.double(), labels), (hidden, weight))
    assert loss.dtype == found[1].dtype == torch.float32
    assert all(relative_error(mine, other) < 2e-2 for mine, other in zip(found, wanted, strict=True))


def test_a_frozen_head_gets_no_gradient_and_tokens_without_a_label_count_nothing() -> None:
    hidden, weight, labels = head_inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight.detach(), labels, IGNORED)
    expected = torch.autograd.grad(by_logits(hidden, weight, labels), hidden)[0]
    assert relative_error(torch.autograd.grad(loss, hidden)[0], expected) < 1e-13
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), IGNORED)
    assert loss == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


EPS = 1e-5


def formula(x, weight, gate=None):
    x = x if gate is None else x * F.silu(gate)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def norm_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, gate."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((2, 3, 10), (10,), (2, 3, 10))]


def test_gradients_of_the_norms_agree_with_finite_differences() -> None:
    x, weight, gate = norm_inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, None, weight, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x, gate, weight: rms_norm(x, gate, weight, EPS), (x, gate, weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_norms_equal_their_formula_in_the_dtype_of_x(is_gated: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, weight, gate = norm_inputs(dtype)
    y = rms_norm(x, gate if is_gated else None, weight, EPS)
    expected = formula(x.double(), weight.double(), gate.double() if is_gated else None)
    assert y.dtype == dtype
    assert relative_error(y, expected) < tolerance


def test_fp32_weights_serve_bf16_inputs() -> None:
    x, weight, gate = norm_inputs(torch.float32)
    y = rms_norm(x.bfloat16(), gate.bfloat16(), weight, EPS)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)


def test_values_with_and_without_gradient_are_equal_to_the_bit() -> None:
    x, weight, gate = norm_inputs(torch.bfloat16)
    with torch.no_grad():
        alone = rms_norm(x, gate, weight, EPS)
    torch.testing.assert_close(alone, rms_norm(x, gate, weight, EPS).detach(), atol=0, rtol=0)
