"""The plain SSD against its recurrence, position by position."""

import pytest
import torch

from implicit_llm.kernels import chunked_scan, operations
from implicit_llm.kernels import ssd as ssd_module
from implicit_llm.kernels.ssd import ssd
from tests.unit.kernels.reference import ScanCase, ScanInputs, relative_error, sequential_ssd

CHUNK = 16
CASES = [
    ScanCase(batch, length, heads, groups, width, state, has_initial)
    for batch, heads, groups, width, state in ((1, 1, 1, 4, 8), (3, 4, 1, 8, 4), (2, 4, 2, 5, 7), (2, 3, 3, 4, 4))
    for length in (1, 15, 16, 17, 40)
    for has_initial in (False, True)
]
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}


def run(inputs: ScanInputs, *, return_state: bool = True, chunk_len: int = CHUNK):
    return ssd(*inputs.tensors(), return_state=return_state, chunk_len=chunk_len)


def gradients(inputs: ScanInputs, function, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Of a random projection of the outputs that are not None."""
    inputs = inputs.learnable()
    make = torch.Generator().manual_seed(seed)
    outputs = [out for out in function(inputs) if out is not None]
    grads = [torch.randn(out.shape, generator=make, dtype=torch.float64).to(out.dtype) for out in outputs]
    return torch.autograd.grad(outputs, inputs.tensors(), grads, materialize_grads=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_states_and_gradients_equal_the_recurrence(case: ScanCase, dtype: torch.dtype) -> None:
    inputs = case.inputs(dtype)
    exact = inputs.map(torch.Tensor.double)
    y, state = run(inputs)
    expected_y, expected_state = sequential_ssd(exact)
    assert y.dtype == state.dtype == dtype
    assert relative_error(y, expected_y) < TOLERANCE[dtype]
    assert relative_error(state, expected_state) < TOLERANCE[dtype]
    for got, expected in zip(gradients(inputs, run), gradients(exact, sequential_ssd), strict=True):
        assert relative_error(got, expected) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("length", [1, 9, 16, 21])
def test_without_the_state_the_output_and_its_gradients_are_the_same(length: int, has_initial: bool) -> None:
    inputs = ScanCase(2, length, 4, 2, 3, 5, has_initial).inputs()
    y, state = run(inputs, return_state=False)
    assert state is None
    torch.testing.assert_close(y, run(inputs)[0], rtol=0, atol=0)
    ours = gradients(inputs, lambda i: run(i, return_state=False))
    for got, expected in zip(ours, gradients(inputs, lambda i: sequential_ssd(i)[:1]), strict=True):
        assert relative_error(got, expected) < 1e-12
    of_state = gradients(inputs, lambda i: run(i)[1:])
    for got, expected in zip(of_state, gradients(inputs, lambda i: sequential_ssd(i)[1:]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, 8, 11])
def test_gradients_agree_with_finite_differences(length: int) -> None:
    inputs = ScanCase(1, length, 2, 1, 2, 3, has_initial=True).inputs().learnable()

    def call(*tensors: torch.Tensor):
        return ssd(*tensors, return_state=True, chunk_len=4)

    assert torch.autograd.gradcheck(call, inputs.tensors())


@pytest.mark.parametrize("split", [1, 7, 16, 30])
def test_two_halves_with_the_carried_state_equal_one_run(split: int) -> None:
    inputs = ScanCase(3, 37, 4, 2, 4, 6, has_initial=True).inputs()
    y, state = run(inputs)
    first, carried = run(inputs.part(0, split, inputs.initial))
    second, last = run(inputs.part(split, 37, carried))
    torch.testing.assert_close(torch.cat([first, second], dim=1), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [9, 40])
def test_positions_with_dt_0_neither_decay_nor_feed_the_state(length: int) -> None:
    inputs = ScanCase(2, length, 2, 1, 3, 4, has_initial=True).inputs()
    dt = inputs.dt.clone()
    dt[:, :4] = 0
    _, padded = run(ScanInputs(inputs.x, dt, inputs.A, inputs.B, inputs.C, inputs.initial))
    _, short = run(inputs.part(4, length, inputs.initial))
    torch.testing.assert_close(padded, short, rtol=1e-12, atol=1e-12)


def test_strong_decays_give_neither_infinities_nor_nan() -> None:
    inputs = ScanCase(2, 40, 2, 1, 3, 4, has_initial=True, steps=200.0).inputs(torch.float32)
    y, state = run(inputs)
    assert y.isfinite().all()
    assert state.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(inputs, run))


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
@pytest.mark.parametrize("slice_bytes", [1, 2**30])
def test_slices_of_the_batch_and_kept_decays_change_nothing(
    slice_bytes: int, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = ScanCase(5, 40, 4, 1, 3, 4, has_initial=True).inputs()
    expected, expected_gradients = run(inputs), gradients(inputs, run)
    monkeypatch.setattr(chunked_scan, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(ssd_module, "KEPT_BYTES", kept_bytes)
    torch.testing.assert_close(run(inputs), expected)
    torch.testing.assert_close(gradients(inputs, run), expected_gradients)


def test_the_dtypes_are_those_of_the_inputs_under_autocast_too() -> None:
    inputs = ScanCase(2, 20, 4, 1, 8, 8, has_initial=True).inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = run(inputs)
    torch.testing.assert_close(y, run(inputs)[0], rtol=0, atol=0)
    low = inputs.map(torch.Tensor.bfloat16)
    y, state = run(low)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(y, sequential_ssd(low.map(torch.Tensor.double))[0]) < 0.02


def test_D_adds_a_multiple_of_the_input() -> None:
    inputs = ScanCase(2, 9, 4, 1, 3, 4).inputs()
    D = torch.randn(4, dtype=torch.float64)
    y, _ = operations.ssd(*inputs.tensors(), D_H=D)
    torch.testing.assert_close(y, sequential_ssd(inputs)[0] + D[:, None] * inputs.x)
