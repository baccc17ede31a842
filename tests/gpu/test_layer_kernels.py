"""Test that the kernels of a Llama block equal their plain PyTorch twins in fp64, over a grid of shapes.

The Mamba2 mixer and its gradient must equal the formula and its autograd.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from implicit_llm import ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.kernels import selection
from implicit_llm.kernels.selection import kernels
from implicit_llm.models.llama3 import attention
from implicit_llm.models.llama3.attention import Room
from implicit_llm.models.llama3.model import rope_tables
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.ssd import gated_scan
from tests.unit.kernels.reference import DEVICE, ScanInputs, relative_error, sequential_conv, sequential_ssd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = [(1, 64), (3, 24), (12, 64), (4, 16), (2, 96), (2, 128)]  # number of heads, width of a head


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def tables(length: int, width: int, start: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Return rotary tables of consecutive positions; with `batch` > 1 each sequence has its own."""
    positions = start + torch.arange(length, device=DEVICE) + torch.arange(batch, device=DEVICE)[:, None]
    return rope_tables(positions, width, ImplicitLlama3Config.rope_theta, torch.float32)


@pytest.fixture(autouse=True)
def _exact_products(_triton: None) -> None:
    torch.set_float32_matmul_precision("highest")  # for the twins, because the kernels' fp32 products are exact


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
    # Entries of the room after the token are not zero and must not affect the result.
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
    """Return outputs and gradients by name, for fixed gradients of the outputs."""
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


# The tolerances of outputs and of gradients. fp32 products are exact, because in TF32 this gradient is not used.
MIXER_TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (4e-3, 8e-3), torch.bfloat16: (1.5e-2, 4e-2)}
LONG = (64, 1, 128)  # P, G, N
# With a state of 64, Triton 3.4 to 3.7.0 compile products of transposed sums incorrectly for Hopper.
SIZES = [LONG, (64, 2, 128), (32, 1, 64), (16, 2, 16), (64, 1, 64), (64, 2, 64), (128, 1, 64), (32, 1, 128)]
CASES = [
    *((length, sizes) for sizes in SIZES for length in (2, 50, 65, 200)),
    *((length, LONG) for length in (1, 16, 32, 64, 128, 512, 1000, 2048, 4097)),
    (4097, (64, 1, 64)),
]
NUM_HEADS = 4


def make_inputs(length: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return `projected` in `dtype`, and parameters in fp32, in which they are trained."""
    width, groups, state = sizes
    inner, channels = NUM_HEADS * width, NUM_HEADS * width + 2 * groups * state
    make = torch.Generator().manual_seed(length)
    projected = torch.randn(3, length, inner + channels + NUM_HEADS, generator=make)
    weights = (
        torch.randn(channels, 4, generator=make) * 0.4,
        torch.randn(channels, generator=make) * 0.1,
        torch.randn(NUM_HEADS, generator=make) - 2,
        -1 - 4 * torch.rand(NUM_HEADS, generator=make),
        torch.randn(NUM_HEADS, generator=make),
    )
    return projected.to(DEVICE, dtype), *(t.to(DEVICE) for t in weights)


State = tuple[Tensor, Tensor]  # SSM state (B, H, P, N), last inputs of the convolution (B, K - 1, C)


def make_state(sizes: tuple[int, int, int], dtype: torch.dtype) -> State:
    """Return a state before three sequences; `dtype` represents its SSM state exactly."""
    (width, groups, size), make = sizes, torch.Generator().manual_seed(7)
    ssm_BHPN = torch.randn(3, NUM_HEADS, width, size, generator=make).to(DEVICE, dtype).float()
    inputs_BKC = torch.randn(3, 3, NUM_HEADS * width + 2 * groups * size, generator=make)
    return ssm_BHPN, inputs_BKC.to(DEVICE, dtype)


def plain(
    projected_BLE: Tensor, weights: ScanWeights, sizes: tuple[int, int, int], state: State | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the formula position by position, in the dtype of its inputs, and the last SSM state."""
    width, groups, size = sizes
    inner, bc = NUM_HEADS * width, groups * size
    gate, xBC, dt = projected_BLE.split([inner, inner + 2 * bc, NUM_HEADS], dim=-1)
    ssm_BHPN, inputs_BKC = (None, None) if state is None else (t.to(xBC) for t in state)
    convolved = F.silu(sequential_conv(xBC, weights.conv_CK, weights.conv_bias_C, inputs_BKC))
    x, B, C = convolved.split([inner, bc, bc], dim=-1)
    x_BLHP, (B_BLGN, C_BLGN) = x.unflatten(-1, (NUM_HEADS, width)), (t.unflatten(-1, (groups, size)) for t in (B, C))
    dt_BLH = F.softplus(dt + weights.dt_bias_H)
    y_BLHP, ssm_BHPN = sequential_ssd(ScanInputs(x_BLHP, dt_BLH, weights.A_H, B_BLGN, C_BLGN, ssm_BHPN))
    return (y_BLHP + weights.D_H[:, None] * x_BLHP).flatten(2) * F.silu(gate), ssm_BHPN


def results(
    inputs: tuple[Tensor, ...], sizes: tuple[int, int, int], state: State | None = None, *, return_state: bool = False
) -> dict[str, Tensor]:
    """Return the output and gradients by name, with a separate gradient for each part of the projection.

    With `return_state` also the last SSM state, which has no gradient if a kernel computes it.
    """
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    weights = ScanWeights(*leaves[1:])
    is_exact = leaves[0].dtype == torch.float64
    y, last = (
        plain(leaves[0], weights, sizes, state)
        if is_exact
        else gated_scan(leaves[0], None, weights, sizes, state, return_state=return_state)
    )
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
    gradients = torch.autograd.grad(y, leaves, dy)
    inner, bc = NUM_HEADS * sizes[0], sizes[1] * sizes[2]
    columns = dict(
        zip(("gate", "x", "B", "C", "dt"), gradients[0].split([inner, inner, bc, bc, NUM_HEADS], -1), strict=True)
    )
    found = {"y": y.detach()} | columns | dict(zip(ScanWeights._fields, gradients[1:], strict=True))
    if return_state:
        assert last.requires_grad == is_exact
        found["last"] = last.detach()
    return found


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    errors = {name: relative_error(ours[name], exact[name]) for name in ours}
    wrong = {name: error for name, error in errors.items() if not error < MIXER_TOLERANCE[ours["y"].dtype][name != "y"]}
    assert not wrong, f"{wrong} of all errors {errors}"


@pytest.mark.parametrize("dtype", MIXER_TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "sizes"), CASES, ids=str)
def test_a_mixer_and_its_gradients_equal_the_formula(
    length: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make_inputs(length, sizes, dtype)
    ours, exact = results(inputs, sizes), results(tuple(t.double() for t in inputs), sizes)
    assert ours["y"].dtype == dtype
    if length == 1:  # there is no decay from an empty state
        assert ours.pop("A_H").abs().max() < MIXER_TOLERANCE[dtype][1]
    assert_close(ours, exact)


@pytest.mark.parametrize("dtype", MIXER_TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [LONG, (64, 2, 128), (32, 1, 64)], ids=str)
@pytest.mark.parametrize("length", [1, 8, 32, 50, 200, 1000])
def test_a_mixer_after_a_carried_state_and_its_gradients_equal_the_formula(
    length: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs, state = make_inputs(length, sizes, dtype), make_state(sizes, dtype)
    ours = results(inputs, sizes, state, return_state=True)
    assert_close(ours, results(tuple(t.double() for t in inputs), sizes, state, return_state=True))
    assert relative_error(ours["y"], results(inputs, sizes)["y"]) > 0.1  # the state matters
    alone = results(inputs, sizes, state)
    assert all(torch.equal(alone[name], ours[name]) for name in alone)


def test_gradients_are_the_same_every_time() -> None:
    inputs = make_inputs(1000, LONG, torch.bfloat16)
    first, second = (results(inputs, LONG) for _ in range(2))
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("taps", [2, 3])
def test_narrower_convolutions_equal_the_formula(taps: int, dtype: torch.dtype) -> None:
    inputs = list(make_inputs(100, LONG, dtype))
    inputs[1] = inputs[1][:, -taps:].contiguous()
    assert_close(results(tuple(inputs), LONG), results(tuple(t.double() for t in inputs), LONG))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("length", "is_carried"), [(32, False), (32, True), (256, False), (600, False), (600, True)])
def test_a_training_step_goes_through_it_and_equals_the_plain_one(
    length: int, is_carried: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = ImplicitMamba2Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, head_dim=64, state_size=128, is_implicit=False
    )
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    tokens = torch.randint(64, (3, length), device=DEVICE)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                before = model(input_ids=tokens, use_cache=True).past_key_values if is_carried else None
            model(input_ids=tokens, labels=tokens, past_key_values=before).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    calls: list[bool] = []
    decide = selection.trained_scan_runs_on_triton
    monkeypatch.setattr(
        "implicit_llm.models.mamba2.model.trained_scan_runs_on_triton",
        lambda *inputs: calls.append(decide(*inputs)) or calls[-1],
    )
    ours = gradients()
    assert calls == [True, True]
    with kernels("torch"):
        expected = gradients()
    for name, gradient in expected.items():
        assert relative_error(ours[name], gradient) < (0.1 if bf16 else 1e-3), name
