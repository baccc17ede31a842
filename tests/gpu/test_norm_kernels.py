"""The norms as Triton kernels against their plain PyTorch twin in fp64, over a grid of shapes."""

import pytest
import torch
from torch import Tensor

from implicit_llm.kernels.operations import rms_norm
from implicit_llm.kernels.selection import kernels
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
WIDTHS = [3, 48, 256, 1000, 1024, 4096, 16384]
EPS = 1e-5


def make_inputs(rows: tuple[int, ...], width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, a gate and a gradient that are slices of wider rows, as the projection gives them, and a weight in fp32."""
    make = torch.Generator().manual_seed(0)
    x, gate, dy = (torch.randn(*rows, width + 8, generator=make).to(DEVICE, dtype)[..., 8:] for _ in range(3))
    return x.contiguous(), gate, dy, torch.randn(width, generator=make).to(DEVICE)


def results(x: Tensor, gate: Tensor | None, dy: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Output and gradients by name."""
    leaves = {"x": x, "weight": weight} if gate is None else {"x": x, "gate": gate, "weight": weight}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    y = rms_norm(leaves["x"], leaves.get("gate"), leaves["weight"], EPS)
    assert y.dtype == x.dtype
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}


def assert_equals_plain(x: Tensor, gate: Tensor | None, dy: Tensor, weight: Tensor) -> None:
    ours = results(x, gate, dy, weight)
    with kernels("torch"):
        exact = results(*(None if t is None else t.double() for t in (x, gate, dy, weight)))
    errors = {name: relative_error(ours[name], expected) for name, expected in exact.items()}
    assert max(errors.values()) < TOLERANCE[x.dtype], errors


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5, 7), (2, 2048)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_and_its_gradients_equal_the_plain_ones(
    width: int, rows: tuple[int, ...], is_gated: bool, dtype: torch.dtype
) -> None:
    x, gate, dy, weight = make_inputs(rows, width, dtype)
    assert_equals_plain(x, gate if is_gated else None, dy, weight)


@pytest.mark.parametrize("width", [32768, 30000])
def test_the_widest_rows_equal_the_plain_ones(width: int) -> None:
    assert_equals_plain(*make_inputs((3, 50), width, torch.bfloat16))


def test_x_may_be_a_slice_and_transposed() -> None:
    _, x, dy, weight = make_inputs((6, 9), 64, torch.float32)
    assert_equals_plain(x, None, dy, weight)
    assert_equals_plain(x.transpose(0, 1), None, dy.transpose(0, 1), weight)
    assert_equals_plain(x.mT.contiguous().mT, None, dy, weight)
    assert_equals_plain(x, None, dy[:1, :1, :1].expand(6, 9, 64), weight)


def test_no_rows_give_no_rows_and_a_gradient_of_zero() -> None:
    found = results(*make_inputs((0, 4), 64, torch.bfloat16))
    assert found["y"].shape == found["gradient of gate"].shape == (0, 4, 64)
    assert found["gradient of weight"].tolist() == [0.0] * 64


def test_the_weight_may_be_in_another_dtype_and_need_no_gradient() -> None:
    x, gate, dy, weight = make_inputs((3, 4), 64, torch.bfloat16)
    x.requires_grad_()
    rms_norm(x, gate, weight, EPS).backward(dy)
    assert weight.grad is None
    assert x.grad.dtype == torch.bfloat16
    weight = weight.half().requires_grad_()
    rms_norm(x, gate, weight, EPS).backward(dy)
    assert weight.grad.dtype == torch.float16
