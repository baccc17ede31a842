"""Test that our Triton kernels equal their plain PyTorch twins over a grid of shapes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from implicit_llm import ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.kernels.norm import Unscaled, add_and_norm, rms_norm
from implicit_llm.kernels.selection import kernels
from implicit_llm.models.backbone import ImplicitModel, StackMap
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.layers import added
from implicit_llm.models.runner import Runner
from implicit_llm.models.stack import StackInput
from implicit_llm.solver.fixed_point import Best
from implicit_llm.solver.passes import Search, solve_blocks
from implicit_llm.solver.residual import make_rule
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # fp32 products are in TF32
MIXERS = [
    *((length, (64, groups, 128)) for groups in (1, 2) for length in (1, 16, 32, 50, 64, 65, 256)),
    *((length, (64, 1, 128)) for length in (1000, 2048, 4097)),
    *((200, sizes) for sizes in ((128, 1, 128), (64, 1, 256), (64, 1, 64), (32, 1, 128), (16, 2, 16))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "sizes"), MIXERS, ids=str)
@pytest.mark.parametrize("has_state", [False, True])
def test_a_mixer_in_one_kernel_equals_the_plain_one(
    has_state: bool, length: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    head_dim, groups, state_size = sizes
    config = ImplicitMamba2Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=1, expand=2, head_dim=head_dim, state_size=state_size,
        n_groups=groups,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    x = model.backbone.stack_input(torch.zeros(3, length, 128).to(DEVICE), None, None, None)
    (h, u, mask), layer = torch.randn(3, 3, length, 128, device=DEVICE), model.backbone.layers[0]
    mixer = layer.mixer
    torch.nn.init.uniform_(mixer.norm.weight, 0.5, 1.5)
    shapes = (3, mixer.heads, head_dim, state_size), (3, 3, mixer.conv_channels)
    state = tuple(torch.randn(shape).to(DEVICE) for shape in shapes) if has_state else None
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        weights = mixer.weights()
        found, found_state = mixer(u, weights, x, state, True)
        assert isinstance(found, Unscaled)
        sums = layer.normed(h, found * mask)
        with kernels("torch"):
            expected, expected_state = mixer(u, weights, x, state, True)
            expected_sums = layer.normed(h, expected * mask)
    assert relative_error(torch.zeros_like(expected) + found, expected) < TOLERANCE[dtype]
    for mine, other in zip(sums, expected_sums, strict=True):
        assert relative_error(mine, other) < TOLERANCE[dtype]
    for mine, other in zip(found_state, expected_state, strict=True):
        assert relative_error(mine, other) < TOLERANCE[dtype]


class _Factor(nn.Module):
    """A layer whose branch is its injection times a factor."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor, self.given = factor, None

    def forward(self, h: Tensor, branch: Tensor | None, x: StackInput, *_: object) -> tuple[Tensor, Tensor, None]:
        self.given = x.injection_BLE
        return added(h, branch), x.injection_BLE * self.factor, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 401), (2, 2048, 3352)], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 8, 9, 20])
def test_the_gradients_of_an_injection_are_summed_at_once(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    injection = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    factors = torch.randn(layers, shape[-1], device=DEVICE).to(dtype)
    norm = SimpleNamespace(of_sum=lambda h, branch: (None, h + branch))
    stack = SimpleNamespace(layers=[_Factor(factor) for factor in factors], _final_norm="norm", norm=norm)
    x, dy = StackInput((None,) * layers, injection), torch.randn(shape, device=DEVICE).to(dtype)
    y, _ = ImplicitModel.apply_stack(stack, torch.zeros_like(injection), x)
    assert (stack.layers[0].given is injection) == (layers == 1)
    expected = sum(dy.double() * factor.double() for factor in factors)
    found, again = (torch.autograd.grad(y, injection, dy, retain_graph=True)[0] for _ in range(2))
    assert relative_error(found, expected) < 2 * torch.finfo(dtype).eps
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [100, 5000, 50277])
def test_the_fused_head_equals_its_logits(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=DEVICE, requires_grad=True)
    weight = (torch.randn(vocab, 64, device=DEVICE) * 0.3).requires_grad_()
    labels = torch.randint(vocab, (300,), device=DEVICE)
    labels[::7] = -100
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    expected = F.cross_entropy(hidden.double() @ weight.double().t(), labels, ignore_index=-100, reduction="sum")
    assert relative_error(loss, expected) < TOLERANCE[dtype]
    wanted = torch.autograd.grad(expected, (hidden, weight))
    for mine, other in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert relative_error(mine, other) < TOLERANCE[dtype]


def test_a_small_factor_of_the_loss_keeps_its_digits_in_the_gradient_of_an_fp16_head() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=DEVICE, dtype=torch.float16, requires_grad=True)
    weight, labels = torch.randn(100, 64, device=DEVICE) * 0.3, torch.randint(100, (300,), device=DEVICE)
    whole, small = (
        torch.autograd.grad(factor * linear_cross_entropy(hidden, weight, labels), hidden)[0] for factor in (1, 1e-3)
    )
    assert relative_error(small, 1e-3 * whole.double()) < 2e-3


@pytest.mark.parametrize("stop", ["sequence", "token"])
@pytest.mark.parametrize("shape", [(6, 1, 768), (6, 32, 256), (5, 100, 48), (5, 2048, 768)])
def test_an_iteration_judged_by_kernels_equals_the_plain_rule(shape: tuple[int, int, int], stop: str) -> None:
    torch.manual_seed(0)
    z0, rule = torch.zeros(shape, device=DEVICE), make_rule(stop, 0.5, is_training=True)
    mine, plain = Best(z0), Best(z0)
    for iteration in range(6):
        active = torch.arange(shape[0], device=DEVICE) if iteration < 3 else torch.tensor([0, 2, 4], device=DEVICE)
        z = torch.randn(len(active), *shape[1:], device=DEVICE)
        fz = z + torch.randn_like(z) * torch.rand(len(active), shape[1], 1, device=DEVICE) * 1.2
        if iteration == 4:
            fz[1, shape[1] // 2] = float("nan")
        mine.take(active, (z, fz, fz), rule)
        with kernels("torch"):
            plain.take(active, (z, fz, fz), rule)
    assert_same_record(mine, plain, rtol=1e-5)


def assert_same_record(mine: Best, plain: Best, rtol: float) -> None:
    for name in ("z", "done", "num_iter", "non_finite"):
        assert torch.equal(getattr(mine, name), getattr(plain, name)), name
    for name in ("rank_BL", "residual_BL"):
        torch.testing.assert_close(getattr(mine, name), getattr(plain, name), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("of_products", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", ["sequence", "token"])
@torch.no_grad()
def test_a_layer_solved_at_once_equals_its_blocks_one_by_one(stop: str, of_products: torch.dtype) -> None:
    torch.manual_seed(0)
    config = ImplicitMamba2Config(
        vocab_size=31, hidden_size=64, num_hidden_layers=1, expand=2, head_dim=32, state_size=64
    )
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval().backbone
    search = Search(make_rule(stop, 0.02, is_training=False), 20, "damped", 0.8)
    embedding = torch.randn(4, 32, 64).to(DEVICE)
    with torch.autocast(DEVICE, dtype=of_products):
        start = model.stack_input(embedding[:, :16], None, None, None)
        found = model.solve_at_once(start, 8, search)
        assert found is not None
        after = model.stack_input(embedding[:, 16:], None, None, found[1])
        found = model.solve_at_once(after, 8, search)
        with kernels("torch"):
            expected = solve_blocks(
                StackMap(model, after), torch.zeros_like(embedding[:, 16:]), search, 8, after.prefix
            )
    error = 2 * TOLERANCE[torch.bfloat16]  # a dozen iterations of rounding
    assert relative_error(found[0], expected[0]) < error
    for mine, other in zip(found[1].layers[0], expected[1].layers[0], strict=True):
        assert relative_error(mine, other) < error
    assert found[1].length == expected[1].length == 32
    for (width, mine), (_, other) in zip(found[2], expected[2], strict=True):
        assert width == 8
        assert (mine.num_iter - other.num_iter).abs().max() <= 1  # rounding may change the number by one
        assert torch.equal(mine.is_converged, other.is_converged)
        assert mine.unconverged_BL.shape == other.unconverged_BL.shape
    assert found[2][0][1].num_iter.max() > 2


MAMBA = ImplicitMamba2Config(vocab_size=97, hidden_size=64, num_hidden_layers=2, head_dim=32, state_size=32)
LLAMA = ImplicitLlama3Config(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
)
EXPLICIT = ImplicitMamba2Config(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, head_dim=32, state_size=32, is_implicit=False
)


def test_only_a_stack_without_gradient_leaves_a_norm_to_the_next_layer_and_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_config(MAMBA).to(DEVICE).eval().backbone
    for layer in model.layers:
        torch.nn.init.uniform_(layer.mixer.norm.weight, 0.5, 1.5)
    z, embedding, *masks = torch.randn(4, 3, 40, 64).to(DEVICE)
    x = replace(model.stack_input(embedding, None, None, None), dropout_masks=tuple(masks))
    first = model.layers[0]

    def collected() -> list[Tensor]:
        found: list[Tensor] = []
        model.apply_stack(z, x, collect=found)
        return found

    with torch.no_grad():
        assert isinstance(first(z, None, x, 0, False)[1], Unscaled)
        found = collected()
        with model.norm_f.register_forward_hook(lambda *_: None):
            called = collected()
        with kernels("torch"):
            expected = collected()
    with_gradient = collected()
    for others in (called, expected, with_gradient):
        for mine, other in zip(found, others, strict=True):
            assert relative_error(mine, other.detach()) < 1e-5
    assert isinstance(first(z, None, x, 0, False)[1], Tensor)
    model.half()
    with torch.no_grad():  # an fp16 product could overflow
        x = model.stack_input(embedding.half(), None, None, None)
        assert isinstance(first(z.half(), None, x, 0, False)[1], Tensor)


@pytest.mark.parametrize("config", [MAMBA, LLAMA, EXPLICIT], ids=["mamba2", "llama3", "explicit"])
@pytest.mark.parametrize("bf16", [False, True])
def test_tokens_from_graphs_equal_those_of_the_plain_code(config, bf16: bool) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    if model.solver is not None:  # with a looser tolerance, rounding could change the number of iterations
        model.solver = replace(model.solver, tol=1e-3, eval_max_iter=60)
    prompt, tokens = torch.randint(97, (3, 9)).to(DEVICE), torch.randint(97, (3, 300)).to(DEVICE)

    def logits() -> list[torch.Tensor]:
        cache, found = ConvergedStateCache(), []
        with torch.inference_mode(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
            model(input_ids=prompt, past_key_values=cache)
            for token in tokens.split(1, dim=1):  # more tokens than the first graphs have room for
                found.append(model(input_ids=token, past_key_values=cache).logits)
        return found

    replayed = torch.cat(logits(), dim=1)
    model.base.runner = Runner()
    plain = torch.cat(logits(), dim=1)
    difference_T = (replayed - plain).float().abs().amax(-1).flatten() / plain.float().abs().max()
    if bf16:  # another order of rounding changes one token in twenty by 0.2, and single tokens by 0.9
        assert difference_T.quantile(0.9) < 0.15
    else:
        assert difference_T.max() < 0.02
    assert (replayed.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9


def test_weights_that_change_are_seen_by_the_next_token() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MAMBA).to(DEVICE).eval()
    cache, token = ConvergedStateCache(), torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        for _ in range(8):
            model(input_ids=token, past_key_values=cache)
        assert model.backbone.runner.decoders[cache].graph is not None
        model.backbone.norm_f.weight.mul_(0)
        assert model(input_ids=token, past_key_values=cache).last_hidden_state.abs().max() == 0


NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
WIDTHS = [3, 48, 256, 1000, 1024, 4096, 16384]
EPS = 1e-5


def norm_inputs(rows: tuple[int, ...], width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a gate, a gradient and a weight in fp32; gate and gradient are slices of wider rows, as in a model."""
    make = torch.Generator().manual_seed(0)
    x, gate, dy = (torch.randn(*rows, width + 8, generator=make).to(DEVICE, dtype)[..., 8:] for _ in range(3))
    return x.contiguous(), gate, dy, torch.randn(width, generator=make).to(DEVICE)


def norm_results(x: Tensor, gate: Tensor | None, dy: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the output and gradients by name."""
    leaves = {"x": x, "weight": weight} if gate is None else {"x": x, "gate": gate, "weight": weight}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    y = rms_norm(leaves["x"], leaves.get("gate"), leaves["weight"], EPS)
    assert y.dtype == x.dtype
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}


def assert_equals_plain(x: Tensor, gate: Tensor | None, dy: Tensor, weight: Tensor) -> None:
    ours = norm_results(x, gate, dy, weight)
    with kernels("torch"):
        exact = norm_results(*(None if t is None else t.double() for t in (x, gate, dy, weight)))
    errors = {name: relative_error(ours[name], expected) for name, expected in exact.items()}
    assert max(errors.values()) < NORM_TOLERANCE[x.dtype], errors


@pytest.mark.parametrize("dtype", NORM_TOLERANCE, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5, 7), (2, 2048)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_and_its_gradients_equal_the_plain_ones(
    width: int, rows: tuple[int, ...], is_gated: bool, dtype: torch.dtype
) -> None:
    x, gate, dy, weight = norm_inputs(rows, width, dtype)
    assert_equals_plain(x, gate if is_gated else None, dy, weight)


@pytest.mark.parametrize("dtype", NORM_TOLERANCE, ids=str)
def test_a_norm_before_products_is_the_one_in_fp32_rounded(dtype: torch.dtype) -> None:
    x, _, dy, weight = norm_inputs((5, 7), 48, torch.float32)
    leaves, dy = (x.requires_grad_(), weight.requires_grad_()), dy.to(dtype)
    narrow, rounded = rms_norm(x, None, weight, EPS, dtype), rms_norm(x, None, weight, EPS).to(dtype)
    assert torch.equal(narrow, rounded)
    # The kernel is compiled for another dtype of dy and may round its sums differently.
    for mine, other in zip(*(torch.autograd.grad(y, leaves, dy) for y in (narrow, rounded)), strict=True):
        assert relative_error(mine, other) < 1e-6


@pytest.mark.parametrize("branch_dtype", NORM_TOLERANCE, ids=str)
@pytest.mark.parametrize("is_last", [False, True])  # whether the sum has no later use
@pytest.mark.parametrize("rows", [(1,), (5, 7), (2, 2048)], ids=str)
@pytest.mark.parametrize("width", [3, 48, 768, 2048, 16384])
def test_a_sum_its_norm_and_their_gradients_equal_the_plain_ones(
    width: int, rows: tuple[int, ...], is_last: bool, branch_dtype: torch.dtype
) -> None:
    h, branch, dy, weight = norm_inputs(rows, width, torch.float32)
    for dtype in {torch.float32, branch_dtype}:  # the residual stream is in fp32 or in the dtype of its branches
        given = h.to(dtype), branch.to(branch_dtype), weight
        found = sum_results(*given, dy.to(branch_dtype), is_last)
        with kernels("torch"):
            exact = sum_results(*(t.double() for t in given), dy.to(branch_dtype).double(), is_last)
        assert [t.dtype for t in found] == [dtype, branch_dtype, dtype, branch_dtype, torch.float32]
        errors = [relative_error(mine, other) for mine, other in zip(found, exact, strict=True)]
        assert max(errors) < NORM_TOLERANCE[branch_dtype], errors


@pytest.mark.parametrize("branch_dtype", NORM_TOLERANCE, ids=str)
@pytest.mark.parametrize("parts", [1, 24])
@pytest.mark.parametrize("rows", [(1,), (5, 7), (2, 2048)], ids=str)
@pytest.mark.parametrize("width", [3, 48, 768, 2048, 16384])
def test_a_sum_that_scales_its_branch_equals_the_plain_one(
    width: int, rows: tuple[int, ...], parts: int, branch_dtype: torch.dtype
) -> None:
    h, branch, _, weight = norm_inputs(rows, width, torch.float32)
    squares = torch.rand(*rows, parts, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 100 / parts
    for dtype in {torch.float32, branch_dtype}:
        unscaled = Unscaled(branch.to(branch_dtype), squares, 64, EPS)
        found = add_and_norm(h.to(dtype), unscaled, weight, EPS, branch_dtype)
        exact = replace(unscaled, rows=unscaled.rows.double(), squares=squares.double())
        with kernels("torch"):
            expected = add_and_norm(h.to(dtype).double(), exact, weight.double(), EPS)
            scaled = exact.rows * (squares.double().mean(-1, keepdim=True) * parts / 64 + EPS).rsqrt()
        assert relative_error(expected[0], h.to(dtype).double() + scaled) < 1e-9
        assert [t.dtype for t in found] == [dtype, branch_dtype]
        errors = [relative_error(mine, other) for mine, other in zip(found, expected, strict=True)]
        assert max(errors) < NORM_TOLERANCE[branch_dtype], errors


def sum_results(h: Tensor, branch: Tensor, weight: Tensor, dy: Tensor, is_last: bool) -> tuple[Tensor, ...]:
    """Return the sum, its norm, and the gradients of h, branch and weight."""
    leaves = [t.detach().requires_grad_() for t in (h, branch, weight)]
    total, y = add_and_norm(*leaves, EPS, branch.dtype)
    outputs, given = ((y,), (dy,)) if is_last else ((total, y), (h.flip(-1), dy))
    return total.detach(), y.detach(), *torch.autograd.grad(outputs, leaves, given)


@pytest.mark.parametrize("width", [32768, 30000])
def test_the_widest_rows_equal_the_plain_ones(width: int) -> None:
    assert_equals_plain(*norm_inputs((3, 50), width, torch.bfloat16))


def test_x_may_be_a_slice_and_transposed() -> None:
    _, x, dy, weight = norm_inputs((6, 9), 64, torch.float32)
    assert_equals_plain(x, None, dy, weight)
    assert_equals_plain(x.transpose(0, 1), None, dy.transpose(0, 1), weight)
    assert_equals_plain(x.mT.contiguous().mT, None, dy, weight)
    assert_equals_plain(x, None, dy[:1, :1, :1].expand(6, 9, 64), weight)


def test_no_rows_give_no_rows_and_a_gradient_of_zero() -> None:
    found = norm_results(*norm_inputs((0, 4), 64, torch.bfloat16))
    assert found["y"].shape == found["gradient of gate"].shape == (0, 4, 64)
    assert found["gradient of weight"].tolist() == [0.0] * 64


def test_the_weight_may_be_in_another_dtype_and_need_no_gradient() -> None:
    x, gate, dy, weight = norm_inputs((3, 4), 64, torch.bfloat16)
    x.requires_grad_()
    rms_norm(x, gate, weight, EPS).backward(dy)
    assert weight.grad is None
    assert x.grad.dtype == torch.bfloat16
    weight = weight.half().requires_grad_()
    rms_norm(x, gate, weight, EPS).backward(dy)
    assert weight.grad.dtype == torch.float16
