"""The kernels around the attention of a Llama block against their plain PyTorch twins in fp64 over a grid of shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from implicit_llm.kernels import attention
from implicit_llm.kernels.attention import Room
from implicit_llm.kernels.selection import kernels
from implicit_llm.models.configuration import ImplicitLlama3Config
from implicit_llm.models.llama3 import rope_tables
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = [(1, 64), (3, 24), (12, 64), (4, 16), (2, 96), (2, 128)]  # heads and their width


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def tables(length: int, width: int, start: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary tables of consecutive positions, of each sequence its own if there are several."""
    positions = start + torch.arange(length, device=DEVICE) + torch.arange(batch, device=DEVICE)[:, None]
    return rope_tables(positions, width, ImplicitLlama3Config.rope_theta, torch.float32)


@pytest.fixture(autouse=True)
def _exact_products(_triton: None) -> None:
    torch.set_float32_matmul_precision("highest")  # of the twins; the kernels' fp32 products are exact


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_injection", [False, True])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 299])
@torch.no_grad()
def test_a_token_in_one_kernel_equals_the_plain_attention(
    position: int, sizes: tuple[int, int], has_injection: bool, dtype: torch.dtype
) -> None:
    (heads, width), batch, room = sizes, 3, 300
    qkv = normal(batch, 1, 3 * heads * width, dtype=dtype)
    injection = normal(batch, 1, 3 * heads * width, dtype=dtype) if has_injection else None
    # What follows the token in the room is not zero, and must not count.
    kept = [normal(batch, heads, room, width, dtype=dtype) for _ in range(2)]
    exact = [t.double() for t in kept]
    at = torch.tensor([position], device=DEVICE)
    for rope in (tables(1, width, position), tables(1, width, position, batch)):
        found = attention.room_attention(qkv, injection, rope, Room(*kept, at))
        with kernels("torch"):
            wide = None if injection is None else injection.double()
            expected = attention.room_attention(qkv.double(), wide, rope, Room(*exact, at))
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        for mine, other in zip((found, *kept), (expected, *exact), strict=True):
            assert relative_error(mine, other) < TOLERANCE[dtype]


def outcome(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name, for fixed gradients of the outputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    given = [torch.linspace(-2, 2, t.numel(), device=DEVICE).bfloat16().to(t.dtype).view(t.shape) for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves, given)
    named = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return named | {f"gradient {i}": t for i, t in enumerate(gradients)}


def assert_equals_fp64(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
    dtype, found = inputs[0].dtype, outcome(function, inputs)
    with kernels("torch"):
        expected = outcome(function, [t.double() for t in inputs])
    errors = {name: relative_error(found[name], other) for name, other in expected.items()}
    assert {t.dtype for t in found.values()} == {dtype}
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_injection", [False, True])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize(("batch", "length", "tables_of"), [(1, 1, 1), (3, 5, 1), (2, 33, 2)])
def test_rotated_heads_and_their_gradients_equal_the_plain_ones(
    batch: int, length: int, tables_of: int, sizes: tuple[int, int], has_injection: bool, dtype: torch.dtype
) -> None:
    heads, width = sizes
    rope = tables(length, width, 17, tables_of)
    inputs = [normal(batch, length, 3 * heads * width, dtype=dtype) for _ in range(1 + has_injection)]

    def rotated(qkv: Tensor, injection: Tensor | None = None) -> tuple[Tensor, ...]:
        return attention.rotated_heads(qkv, injection, rope, heads)

    assert_equals_fp64(rotated, inputs)


def test_rotation_takes_gradients_of_any_layout() -> None:
    heads, width = 4, 32
    qkv, rope = normal(2, 6, 3 * heads * width).requires_grad_(), tables(6, width)
    given = [normal(2, 6, heads, width).transpose(1, 2), normal(2, heads, 6, width), normal(2, heads, width, 6).mT]
    (mine,) = torch.autograd.grad(attention.rotated_heads(qkv, None, rope, heads), qkv, given)
    with kernels("torch"):
        (plain,) = torch.autograd.grad(attention.rotated_heads(qkv, None, rope, heads), qkv, given)
    assert relative_error(mine, plain) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 5, 96), (2, 7, 4096), (300, 2, 1000), (2, 130, 5504)], ids=str)
def test_swiglu_and_its_gradient_equal_the_plain_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wide = [normal(*shape, dtype=dtype) * 3]
    assert_equals_fp64(lambda t: (attention.swiglu(t),), wide)
