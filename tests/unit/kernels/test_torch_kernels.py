"""The plain convolution, norms, head of the loss, SSD, rotary positions, attention in a room for keys and SwiGLU.

All but the last three are compared with slow references.
"""

import pytest
import torch
from torch.nn import functional as F

from implicit_llm.kernels import linear_cross_entropy as module
from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.kernels.norm import rms_norm
from implicit_llm.models.llama3.attention import Room, room_attention, rotated_heads, swiglu
from implicit_llm.models.llama3.model import rope_tables
from implicit_llm.models.mamba2 import chunked_scan
from implicit_llm.models.mamba2 import ssd as ssd_module
from implicit_llm.models.mamba2.causal_conv import causal_conv
from implicit_llm.models.mamba2.ssd import ssd
from tests.unit.kernels.reference import ScanCase, ScanInputs, relative_error, sequential_conv, sequential_ssd


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
    y, _ = causal_conv(*tensors, silu=silu)
    expected = sequential_conv(*exact, *([] if has_initial else [None]))
    expected = F.silu(expected) if silu else expected
    assert y.dtype == dtype
    assert relative_error(y, expected) < tolerance
    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(y, tensors, grad.to(dtype), allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, grad, allow_unused=True)
    assert all(relative_error(a, b) < 10 * tolerance for a, b in zip(ours, theirs, strict=True) if b.numel())


@pytest.mark.parametrize("split", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("has_initial", [True, False])
def test_two_halves_with_the_carried_inputs_equal_one_run(split: int, has_initial: bool) -> None:
    x, weight, bias, given = conv_inputs(2, 12, 6, 4)
    initial = given if has_initial else None  # an empty start is padded with zeros
    y, state = causal_conv(x, weight, bias, initial, silu=True, return_state=True)
    first, carried = causal_conv(x[:, :split], weight, bias, initial, silu=True, return_state=True)
    second, last = causal_conv(x[:, split:], weight, bias, carried, silu=True, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), y)
    torch.testing.assert_close(last, state, rtol=0, atol=0)
    assert carried.shape == (2, 3, 6)


def test_the_carried_inputs_do_not_keep_the_block_alive() -> None:
    x, weight, bias, _ = conv_inputs(1, 64, 6, 4)
    _, carried = causal_conv(x.detach(), weight, bias, return_state=True)
    assert carried.untyped_storage().nbytes() == carried.nbytes


IGNORED = -100


def head_inputs(dtype: torch.dtype, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(vocab, (23,))
    labels[::5] = IGNORED
    return torch.randn(23, 8, dtype=dtype).requires_grad_(), torch.randn(vocab, 8, dtype=dtype).requires_grad_(), labels


def by_logits(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED, reduction="sum")


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


def test_autocast_leaves_fp64_as_it_is() -> None:
    hidden, weight, labels = head_inputs(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, IGNORED)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels, IGNORED))


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


def test_a_norm_before_products_is_written_in_their_dtype_with_the_same_gradients() -> None:
    x, weight, _ = norm_inputs(torch.float32)
    dy = torch.randn(2, 3, 10).bfloat16()
    narrow, wide = rms_norm(x, None, weight, EPS, torch.bfloat16), rms_norm(x, None, weight, EPS).bfloat16()
    pairs = [torch.autograd.grad(y, (x, weight), dy) for y in (narrow, wide)]
    torch.testing.assert_close((narrow, pairs[0]), (wide, pairs[1]), atol=0, rtol=0)


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
    y, _ = ssd(*inputs.tensors(), D_H=D)
    torch.testing.assert_close(y, sequential_ssd(inputs)[0] + D[:, None] * inputs.x)


HEADS, WIDTH, BATCH, LENGTH = 3, 8, 2, 9


def attention_inputs() -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """qkv, injection and rotary tables."""
    torch.manual_seed(0)
    qkv, injection = torch.randn(2, BATCH, LENGTH, 3 * HEADS * WIDTH, dtype=torch.float64)
    return qkv, injection, rope_tables(torch.arange(LENGTH)[None], WIDTH, 10_000.0, torch.float64)


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    qkv, _, near = attention_inputs()
    q, k, _ = rotated_heads(qkv, None, near, HEADS)
    far = rope_tables(100 + torch.arange(LENGTH)[None], WIDTH, 10_000.0, torch.float64)
    far_q, far_k, _ = rotated_heads(qkv, None, far, HEADS)
    assert not torch.allclose(q, far_q)
    torch.testing.assert_close(q @ k.mT, far_q @ far_k.mT, rtol=1e-4, atol=1e-4)  # angles are in fp32


@pytest.mark.parametrize("split", [(9,), (1,) * 9, (4, 1, 4)])
def test_blocks_in_a_room_attend_like_the_whole_sequence(split: tuple[int, ...]) -> None:
    qkv, injection, rope = attention_inputs()
    q, k, v = rotated_heads(qkv, injection, rope, HEADS)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    # What has not been written is not zero, and must not count.
    keys, values = (torch.randn(BATCH, HEADS, LENGTH + 5, WIDTH, dtype=torch.float64) for _ in range(2))
    found = []
    for position in torch.arange(LENGTH).split(split):
        part = slice(int(position[0]), int(position[-1]) + 1)
        tables = (rope[0][:, part], rope[1][:, part])
        found.append(room_attention(qkv[:, part], injection[:, part], tables, Room(keys, values, position)))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    torch.testing.assert_close(keys[:, :, :LENGTH], k)
    torch.testing.assert_close(values[:, :, :LENGTH], v)


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.tensor([[0.0, 100.0, -100.0, 5.0, 2.0, 3.0]])
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([[0.0, 200.0, 0.0]]))
