"""The mixer in Triton kernels and its gradient against autograd through the formula in fp64, over a grid of shapes."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from implicit_llm.kernels import selection
from implicit_llm.kernels.chunked_scan import ScanWeights
from implicit_llm.kernels.selection import kernels
from implicit_llm.kernels.ssd import gated_scan
from implicit_llm.models.configuration import ImplicitMamba2Config
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
# Of outputs, and of gradients. fp32 multiplies in full: in TF32 this gradient is not used.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (4e-3, 8e-3), torch.bfloat16: (1.5e-2, 4e-2)}
LONG = (64, 1, 128)  # P, G, N
# A state of 64 is where Triton 3.4 to 3.7.0 are known to compile products of transposed sums wrongly for Hopper.
SIZES = [LONG, (64, 2, 128), (32, 1, 64), (16, 2, 16), (64, 1, 64), (64, 2, 64), (128, 1, 64), (32, 1, 128)]
CASES = [
    *((length, sizes) for sizes in SIZES for length in (2, 50, 65, 200)),
    *((length, LONG) for length in (1, 16, 32, 64, 128, 512, 1000, 2048, 4097)),
    (4097, (64, 1, 64)),
]
HEADS = 4


@pytest.fixture(autouse=True)
def _full_products(_triton: None) -> None:
    torch.set_float32_matmul_precision("highest")


def make_inputs(length: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """projected in `dtype`; parameters, as they are trained, in fp32."""
    width, groups, state = sizes
    inner, channels = HEADS * width, HEADS * width + 2 * groups * state
    make = torch.Generator().manual_seed(length)
    projected = torch.randn(3, length, inner + channels + HEADS, generator=make)
    weights = (
        torch.randn(channels, 4, generator=make) * 0.4,
        torch.randn(channels, generator=make) * 0.1,
        torch.randn(HEADS, generator=make) - 2,
        -1 - 4 * torch.rand(HEADS, generator=make),
        torch.randn(HEADS, generator=make),
    )
    return projected.to(DEVICE, dtype), *(t.to(DEVICE) for t in weights)


def plain(projected_BLE: Tensor, weights: ScanWeights, sizes: tuple[int, int, int]) -> Tensor:
    """The formula, position by position, in the dtype of its inputs."""
    width, groups, size = sizes
    inner, bc = HEADS * width, groups * size
    gate, xBC, dt = projected_BLE.split([inner, inner + 2 * bc, HEADS], dim=-1)
    dt_BLH = F.softplus(dt + weights.dt_bias_H)
    padded = F.pad(xBC, (0, 0, 3, 0)).unfold(1, 4, 1)
    x, B, C = F.silu((padded * weights.conv_CK).sum(-1) + weights.conv_bias_C).split([inner, bc, bc], dim=-1)
    x_BLHP = x.unflatten(-1, (HEADS, width))
    B_BLHN, C_BLHN = (t.unflatten(-1, (groups, size)).repeat_interleave(HEADS // groups, dim=2) for t in (B, C))
    state_BHPN, y = x.new_zeros(len(x), HEADS, width, size), []
    for t in range(x.shape[1]):
        fed_BHPN = (dt_BLH[:, t, :, None] * x_BLHP[:, t])[..., None] * B_BLHN[:, t, :, None]
        state_BHPN = (dt_BLH[:, t] * weights.A_H).exp()[..., None, None] * state_BHPN + fed_BHPN
        y.append((state_BHPN @ C_BLHN[:, t, :, :, None]).squeeze(-1))
    y_BLHP = torch.stack(y, dim=1) + weights.D_H[:, None] * x_BLHP
    return y_BLHP.flatten(2) * F.silu(gate)


def results(inputs: tuple[Tensor, ...], sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Output and gradients by name, of the columns of the projection one by one, too."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    weights = ScanWeights(*leaves[1:])
    is_exact = leaves[0].dtype == torch.float64
    y = (
        plain(leaves[0], weights, sizes)
        if is_exact
        else gated_scan(leaves[0], None, weights, sizes, None, return_state=False)[0]
    )
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
    gradients = torch.autograd.grad(y, leaves, dy)
    inner, bc = HEADS * sizes[0], sizes[1] * sizes[2]
    columns = dict(
        zip(("gate", "x", "B", "C", "dt"), gradients[0].split([inner, inner, bc, bc, HEADS], -1), strict=True)
    )
    return {"y": y.detach()} | columns | dict(zip(ScanWeights._fields, gradients[1:], strict=True))


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    errors = {name: relative_error(ours[name], exact[name]) for name in ours}
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE[ours["y"].dtype][name != "y"]}
    assert not wrong, f"{wrong} of all errors {errors}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "sizes"), CASES, ids=str)
def test_a_mixer_and_its_gradients_equal_the_formula(
    length: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make_inputs(length, sizes, dtype)
    ours, exact = results(inputs, sizes), results(tuple(t.double() for t in inputs), sizes)
    assert ours["y"].dtype == dtype
    if length == 1:  # from an empty state nothing decays
        assert ours.pop("A_H").abs().max() < TOLERANCE[dtype][1]
    assert_close(ours, exact)


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
    wide = [t.double() for t in inputs]
    wide[1] = F.pad(wide[1], (4 - taps, 0))
    ours, exact = results(tuple(inputs), LONG), results(tuple(wide), LONG)
    exact["conv_CK"] = exact["conv_CK"][:, -taps:]
    assert_close(ours, exact)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("length", [32, 256, 600])
def test_a_training_step_goes_through_it_and_equals_the_plain_one(
    length: int, bf16: bool, monkeypatch: pytest.MonkeyPatch
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
            model(input_ids=tokens, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    calls: list[bool] = []
    decide = selection.trained_scan_runs_on_triton
    monkeypatch.setattr(
        "implicit_llm.models.mamba2.trained_scan_runs_on_triton",
        lambda *inputs: calls.append(decide(*inputs)) or calls[-1],
    )
    ours = gradients()
    assert calls == [True, True]
    with kernels("torch"):
        expected = gradients()
    for name, gradient in expected.items():
        assert relative_error(ours[name], gradient) < (0.1 if bf16 else 1e-3), name
