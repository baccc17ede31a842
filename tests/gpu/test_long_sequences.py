"""Test our Triton kernels and the published ones at lengths and sizes that 16 and 32 bits cannot count.

A long sequence is compared with the formula in fp64 at both ends; at the end the formula starts from the state that
blocks of a few thousand tokens have carried there. Beyond 2^31 entries the last sequence of a batch must equal, bit for
bit, the result for that sequence alone.

As a script, this module prints the digest, which must be equal in two processes.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.kernels.norm import rms_norm
from implicit_llm.kernels.selection import kernels, missing_of_mamba_ssm
from implicit_llm.models.llama3 import attention
from implicit_llm.models.mamba2.causal_conv import causal_conv
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.ssd import gated_scan, ssd
from implicit_llm.solver.fixed_point import Best
from implicit_llm.solver.residual import make_rule
from tests.gpu import test_fused_kernels as fused
from tests.gpu import test_layer_kernels as layer
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
LENGTHS = [65_535, 65_536, 65_537, 131_072]
END = 64  # number of tokens that are compared at either end
BLOCK = 4096  # number of tokens of the blocks that carry the state to the end
NARROW = torch.bfloat16


@pytest.fixture(autouse=True)
def _exact_products(_triton: None) -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def need_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"{free:.0f} GiB of GPU memory are free, of {gib}")


def normal(*shape: int, dtype: torch.dtype = NARROW) -> Tensor:
    make = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(shape, generator=make, device=DEVICE, dtype=dtype)


def mixer_inputs(batch: int, length: int, dtype: torch.dtype = NARROW) -> tuple[Tensor, ScanWeights]:
    """Return `projected` (B, L, E), and parameters in fp32, in which they are trained."""
    projected, *weights = layer.make_inputs(1, layer.LONG, dtype)
    return normal(batch, length, projected.shape[-1], dtype=dtype), ScanWeights(*weights)


def mixed(
    projected_BLE: Tensor, weights: ScanWeights, state: layer.State | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and if gradients are off the state after it."""
    return gated_scan(projected_BLE, None, weights, layer.LONG, state, return_state=not torch.is_grad_enabled())


@torch.no_grad()
def state_at(position: int, projected_BLE: Tensor, weights: ScanWeights) -> layer.State:
    """Return the state before a position, carried there from block to block."""
    width, groups, size = layer.LONG
    inner, channels = layer.NUM_HEADS * width, layer.NUM_HEADS * width + 2 * groups * size
    ssm_BHPN = torch.zeros(len(projected_BLE), layer.NUM_HEADS, width, size, device=DEVICE)
    inputs_BKC = projected_BLE.new_zeros(len(projected_BLE), 3, channels)
    for start in range(0, position, BLOCK):
        end = min(start + BLOCK, position)
        _, ssm_BHPN = mixed(projected_BLE[:, start:end], weights, (ssm_BHPN, inputs_BKC))
        inputs_BKC = projected_BLE[:, end - 3 : end, inner : inner + channels]
    return ssm_BHPN, inputs_BKC


def assert_both_ends_equal_the_formula(projected_BLE: Tensor, weights: ScanWeights) -> None:
    """Assert that the output and the gradient of the projection equal the formula at both ends."""
    before = state_at(projected_BLE.shape[1] - END, projected_BLE, weights)
    parts = slice(END), slice(-END, None)
    ends = [projected_BLE[:, part].double().requires_grad_() for part in parts]
    leaf = projected_BLE.requires_grad_()
    y_BLI, _ = mixed(leaf, weights)
    given = [normal(*y_BLI[:, part].shape, dtype=y_BLI.dtype) for part in parts]
    (gradient,) = torch.autograd.grad([y_BLI[:, part] for part in parts], leaf, given)
    wide = ScanWeights(*(t.double() for t in weights))
    of_output, of_gradient = layer.MIXER_TOLERANCE[projected_BLE.dtype]
    for part, end, state, dy in zip(parts, ends, (None, before), given, strict=True):
        expected, _ = layer.plain(end, wide, layer.LONG, state)
        assert relative_error(y_BLI[:, part].detach(), expected.detach()) < of_output
        assert relative_error(gradient[:, part], *torch.autograd.grad(expected, end, dy.double())) < of_gradient
    without, _ = layer.plain(ends[1].detach(), wide, layer.LONG)
    assert relative_error(without, y_BLI[:, parts[1]].detach()) > 2 * of_output  # the state matters


@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_mixer_and_its_gradient_equal_the_formula_at_both_ends(length: int) -> None:
    assert_both_ends_equal_the_formula(*mixer_inputs(2, length))


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_the_state_after_a_long_mixer_is_the_one_that_blocks_carry(length: int) -> None:
    projected, weights = mixer_inputs(2, length)
    _, found = mixed(projected, weights)
    expected, _ = state_at(length, projected, weights)
    assert found is not None
    assert relative_error(found, expected) < layer.MIXER_TOLERANCE[NARROW][0]


@pytest.mark.parametrize("length", LENGTHS)
def test_long_rows_of_norm_rotation_and_swiglu_equal_the_plain_ones(length: int) -> None:
    fused.assert_equals_plain(*fused.norm_inputs((1, length), 48, NARROW))
    layer.test_rotated_heads_and_their_gradients_equal_the_plain_ones(1, length, 1, (3, 24), True, NARROW)
    layer.test_swiglu_and_its_gradient_equal_the_plain_ones((1, length, 48), NARROW)


@pytest.mark.parametrize("stop", ["sequence", "token"])
@pytest.mark.parametrize(("length", "width"), [*((length, 48) for length in LENGTHS), (65_537, 8192)])
def test_a_long_iteration_is_judged_by_kernels_as_by_the_plain_rule(length: int, width: int, stop: str) -> None:
    if width > 48:  # with one token per program there are as many programs as tokens
        need_memory(40)
    z = normal(1, length, width, dtype=torch.float32)
    share = torch.linspace(0.1, 1.2, length, device=DEVICE)[:, None]
    fz = torch.addcmul(z, z.flip(1), share)
    rule, active = make_rule(stop, 0.5, is_training=True), torch.arange(1, device=DEVICE)
    mine = Best(torch.zeros_like(z))
    mine.take(active, (z, fz, fz), rule)
    with kernels("torch"):
        plain = Best(torch.zeros_like(z))
        plain.take(active, (z, fz, fz), rule)
    fused.assert_same_record(mine, plain, rtol=1e-4)


@pytest.mark.parametrize("length", [65_536, 65_537])
@torch.no_grad()
def test_the_published_kernels_carry_a_long_sequence_to_its_end(length: int) -> None:
    missing = missing_of_mamba_ssm()
    if missing is not None:
        pytest.skip(missing)
    torch.set_float32_matmul_precision("high")
    heads, width, size = 2, 64, 128
    x, B, C = normal(1, length, heads, width), normal(1, length, 1, size), normal(1, length, 1, size)
    dt, A = normal(1, length, heads, dtype=torch.float32).abs() * 0.1, -torch.ones(heads, device=DEVICE)
    whole, last = ssd(x, dt, A, B, C, return_state=True)
    state, outputs = torch.zeros(1, heads, width, size, device=DEVICE), []
    for start in range(0, length, BLOCK):
        part = slice(start, start + BLOCK)
        with kernels("torch"):
            y, state = ssd(x[:, part], dt[:, part], A, B[:, part], C[:, part], state, return_state=True)
        outputs.append(y)
    assert relative_error(whole[:, -END:], torch.cat(outputs, dim=1)[:, -END:]) < layer.MIXER_TOLERANCE[NARROW][0]
    assert relative_error(last, state) < layer.MIXER_TOLERANCE[NARROW][0]
    weight, rows = torch.randn(64, 4, device=DEVICE), x.flatten(2)[..., :64]
    whole, _ = causal_conv(rows, weight, None)
    with kernels("torch"):
        y, _ = causal_conv(rows[:, -END - 3 :], weight, None)
    assert relative_error(whole[:, -END:], y[:, -END:]) < layer.MIXER_TOLERANCE[NARROW][0]


def assert_last_has_the_same_bits_alone(function: Callable[[Tensor], Tensor], inputs: Tensor, count: int = 1) -> None:
    """Assert that the last `count` of more than 2^31 entries have the same output and gradient as alone."""
    assert inputs[:-count].numel() > 2**31
    found = []
    for given in (inputs, inputs[-count:].clone()):
        leaf = given.detach().requires_grad_()
        y = function(leaf)
        dy = torch.zeros_like(y)
        dy[-count:] = normal(*y[-count:].shape, dtype=y.dtype)
        (gradient,) = torch.autograd.grad(y, leaf, dy)
        found.append((y[-count:].detach().clone(), gradient[-count:].clone()))
        del y, dy, gradient
    for mine, alone in zip(*found, strict=True):
        assert mine.abs().max() > 0
        assert torch.equal(mine, alone)


def test_a_mixer_of_more_than_2_31_entries_has_the_bits_of_its_sequences() -> None:
    need_memory(48)
    projected, weights = mixer_inputs(4, 2**20)
    assert_last_has_the_same_bits_alone(lambda t: mixed(t, weights)[0], projected)


def test_more_than_2_31_entries_of_states_within_one_sequence_reach_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    need_memory(56)
    width, _, size = layer.LONG
    monkeypatch.setattr(layer, "NUM_HEADS", 16)
    projected, weights = mixer_inputs(1, 2**19 + 2 * END, torch.float32)
    chunks = projected.shape[1] // 32
    assert projected.numel() < 2**31 < (chunks - 1) * layer.NUM_HEADS * width * size
    assert_both_ends_equal_the_formula(projected, weights)


def test_rotated_heads_of_more_than_2_31_entries_have_the_bits_of_their_sequences() -> None:
    need_memory(48)
    heads, width, length = 4, 64, 2**20
    rope = layer.tables(length, width)
    assert_last_has_the_same_bits_alone(
        lambda t: torch.cat(attention.rotated_heads(t, None, rope, heads)[:2], dim=-1),
        normal(4, length, 3 * heads * width),
    )


def test_norm_and_swiglu_of_more_than_2_31_entries_have_the_bits_of_their_rows() -> None:
    need_memory(40)
    rows, weight = normal(2**20 + 300, 2064), normal(2064, dtype=torch.float32)
    assert_last_has_the_same_bits_alone(lambda t: rms_norm(t, None, weight, 1e-5), rows, count=300)
    assert_last_has_the_same_bits_alone(attention.swiglu, rows, count=300)


def test_an_iteration_of_more_than_2_31_entries_keeps_the_last_sequence() -> None:
    need_memory(40)
    z = normal(3, 2**20, 1024, dtype=torch.float16)
    best, active = Best(torch.zeros_like(z)), torch.arange(3, device=DEVICE)
    best.take(active, (z, z, z), make_rule("token", 0.5, is_training=True))
    assert best.done.all()
    assert best.residual_BL.abs().max() == 0
    assert torch.equal(best.z[-1], z[-1])


def digest() -> str:
    """Return a hash of the bits of our kernels' outputs and gradients, and of a model's logits."""
    torch.set_float32_matmul_precision("highest")
    found: list[Tensor] = []
    with kernels("triton"):
        for length in (200, 4097):
            found += layer.results(layer.make_inputs(length, layer.LONG, NARROW), layer.LONG).values()
        found += fused.norm_results(*fused.norm_inputs((5, 700), 256, NARROW)).values()
        qkv, rope = normal(2, 33, 3 * 4 * 64).requires_grad_(), layer.tables(33, 64)
        heads = torch.cat(attention.rotated_heads(qkv, None, rope, 4), dim=-1)
        found += [heads.detach(), *torch.autograd.grad(heads.square().sum(), qkv)]
        hidden, labels = normal(300, 64), torch.arange(300, device=DEVICE)
        found.append(linear_cross_entropy(hidden, normal(5000, 64), labels))
        torch.manual_seed(0)
        model, tokens = AutoModelForCausalLM.from_config(fused.MAMBA).to(DEVICE).eval(), torch.arange(64)[None]
        with torch.no_grad(), torch.autocast(DEVICE, dtype=NARROW):
            found.append(model(input_ids=tokens.to(DEVICE)).logits)
    bits = hashlib.sha256()
    for tensor in found:
        bits.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def test_two_processes_give_the_same_bits() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.gpu.test_long_sequences"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [digest()]), done.stderr


if __name__ == "__main__":
    sys.stdout.write(digest() + "\n")
