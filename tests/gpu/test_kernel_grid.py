"""Test that mamba_ssm, causal_conv1d and the torch kernels on a GPU equal the torch kernels in fp64.

An error is the norm of the difference divided by the norm of the reference, which has the same rounded inputs. bf16 has
8 bits of mantissa (rounding 4e-3) and fp16 has 11 (5e-4). SSD in fp32 multiplies in TF32, which also has 11 bits.
"""

import pytest
import torch
from torch import Tensor

from implicit_llm.kernels.selection import Backend, kernels, missing_of_mamba_ssm
from implicit_llm.models.mamba2.causal_conv import causal_conv
from implicit_llm.models.mamba2.ssd import ssd
from tests.unit.kernels.reference import ScanCase, ScanInputs, relative_error

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

# The tolerances of outputs and states, and of gradients; the gradients of dt and A sum differences over a chunk.
TOLERANCE = {torch.float32: (2e-3, 4e-3), torch.float16: (4e-3, 8e-3), torch.bfloat16: (1.5e-2, 4e-2)}
EXACT = (2e-5, 1e-4)  # the torch backend in fp32
CASES = [
    ScanCase(2, 1, 2, 1, 64, 128, has_initial=True),
    ScanCase(2, 7, 4, 1, 32, 64),
    ScanCase(3, 32, 4, 1, 64, 128, has_initial=True),
    ScanCase(2, 65, 4, 2, 64, 64, has_initial=True),
    ScanCase(2, 128, 4, 4, 16, 16),
    ScanCase(2, 200, 8, 1, 64, 128),
    ScanCase(2, 256, 16, 1, 64, 128),
    ScanCase(2, 300, 4, 2, 128, 128, has_initial=True),
    ScanCase(1, 600, 3, 1, 48, 96, has_initial=True),
    ScanCase(1, 100, 2, 1, 256, 64),
    ScanCase(1, 100, 2, 1, 64, 256, has_initial=True),
]
# Every call compiles about 14 kernels for its dtype and widths, so rare combinations have fewer cases.
SCANS = [
    *(("triton", case, dtype, True) for case in CASES for dtype in (torch.float32, torch.bfloat16)),
    *(("triton", case, torch.float16, True) for case in (CASES[2], CASES[5])),
    *(("triton", case, dtype, False) for case in (CASES[3], CASES[6]) for dtype in (torch.float32, torch.bfloat16)),
    *(("torch", case, dtype, True) for case in CASES for dtype in TOLERANCE),
]
CONVOLUTIONS = [(2, 1, 8, 4), (2, 3, 64, 4), (2, 64, 96, 3), (3, 257, 1280, 4), (2, 40, 24, 2)]


@pytest.fixture(autouse=True, scope="module")
def mamba_ssm_is_there() -> None:
    missing = missing_of_mamba_ssm()
    if missing is not None:
        pytest.skip(missing)


def scan_results(inputs: ScanInputs, return_state: bool) -> dict[str, Tensor]:
    """Return outputs and gradients by name, for fixed random gradients of the outputs and a fixed D."""
    leaves = inputs.learnable()
    make = torch.Generator().manual_seed(3)
    D = torch.randn(inputs.x.shape[2], generator=make, dtype=torch.float64)
    D = D.to(inputs.x.device, inputs.dt.dtype).requires_grad_()
    y, state = ssd(*leaves.tensors(), D_H=D, return_state=return_state)
    outputs = {"y": y} if state is None else {"y": y, "state": state}
    grads = [torch.randn(t.shape, generator=make, dtype=torch.float64).to(t.device, t.dtype) for t in outputs.values()]
    names = [name for name in ("x", "dt", "A", "B", "C", "initial") if getattr(leaves, name) is not None]
    gradients = torch.autograd.grad(list(outputs.values()), [*leaves.tensors(), D], grads)
    outputs |= {f"gradient of {name}": gradient for name, gradient in zip([*names, "D"], gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in outputs.items()}


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor], tolerance: tuple[float, float]) -> None:
    errors = {name: relative_error(ours[name], expected) for name, expected in exact.items()}
    wrong = {name: error for name, error in errors.items() if not error < tolerance["gradient" in name]}
    assert not wrong, f"{wrong} of all errors {errors}"


@pytest.mark.parametrize(("backend", "case", "dtype", "return_state"), SCANS, ids=str)
def test_ssd_equals_fp64(backend: Backend, case: ScanCase, dtype: torch.dtype, return_state: bool) -> None:
    torch.set_float32_matmul_precision("high" if backend == "triton" else "highest")
    inputs = case.inputs(dtype, "cuda")
    with kernels(backend):
        ours = scan_results(inputs, return_state)
    with kernels("torch"):
        exact = scan_results(inputs.map(Tensor.double), return_state)
    assert ours["y"].dtype == dtype
    assert_close(ours, exact, EXACT if (backend, dtype) == ("torch", torch.float32) else TOLERANCE[dtype])


def conv_results(tensors: list[Tensor], has_initial: bool, silu: bool) -> dict[str, Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    # In a model x is a slice of the projection's wider rows.
    wide = torch.cat([leaves[0], leaves[0]], dim=-1)[..., leaves[0].shape[-1] :]
    initial = leaves[3] if has_initial else None
    y, state = causal_conv(wide, leaves[1], leaves[2], initial, silu=silu, return_state=True)
    gradients = torch.autograd.grad(
        [y, state], leaves, [torch.ones_like(y) + y.detach(), state.detach()], allow_unused=True
    )
    names = ("x", "weight", "bias", "initial")
    results = {"y": y, "state": state}
    return results | {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_convolution_equals_fp64(sizes, silu: bool, has_initial: bool, dtype: torch.dtype, backend) -> None:
    batch, length, channels, width = sizes
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, length, channels), (channels, width), (channels,), (batch, width - 1, channels))
    tensors = [torch.randn(shape, generator=make).to("cuda") for shape in shapes]
    tensors = [tensors[0].to(dtype), *tensors[1:3], tensors[3].to(dtype)]  # parameters stay fp32
    with kernels(backend):
        ours = conv_results(tensors, has_initial, silu)
    with kernels("torch"):
        exact = conv_results([t.double() for t in tensors], has_initial, silu)
    assert ours["y"].dtype == dtype
    assert_close(ours, exact, TOLERANCE[dtype])
