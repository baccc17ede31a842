"""Every Triton kernel of ours on the CPU: under Triton's interpreter, and compiled for the GPUs that the project names.

The interpreter runs the smaller cases of the tests on GPUs.

In bf16 the interpreter truncates where a GPU rounds. It has no library of device functions, so that two of them have
stand-ins; tests/gpu runs the real ones.

Run as a script for one target, this calls the operations with tensors on the CPU and compiles what they would launch.
"""

import importlib
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.cuda_graphs import blocks
from implicit_llm.kernels import selection
from implicit_llm.models.backbone import StackMap
from implicit_llm.solver.passes import evaluation_pass
from tests.gpu import test_decoding as decoding
from tests.gpu import test_fused_kernels as fused
from tests.gpu import test_layer_kernels as layer
from tests.unit.models.test_captured_passes import EagerRecorder

BOTH = (torch.float32, torch.float16)
NARROW = (16, 2, 16)  # P, G, N
STOPS = ("sequence", "token")
CARD = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=2**18)


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernels")
    import triton.language as tl

    inputs = importlib.import_module("implicit_llm.models.mamba2.triton.scan_inputs")
    stand_ins = SimpleNamespace(exp2=lambda value: tl.exp2(value), fast_dividef=operator.truediv)
    monkeypatch.setattr(inputs, "libdevice", stand_ins)
    monkeypatch.setattr(selection, "_missing_for_triton", lambda: None)
    monkeypatch.setattr(selection, "_unfit", lambda x: None if x.dtype in BOTH else f"{x.dtype}")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: CARD,
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with selection.kernels("triton"):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize(
    ("check", "case"),
    [
        *((fused.test_a_norm_and_its_gradients_equal_the_plain_ones, (48, (5, 7), gated)) for gated in (False, True)),
        (fused.test_a_norm_before_products_is_the_one_in_fp32_rounded, ()),
        *((fused.test_the_gradients_of_an_injection_are_summed_at_once, (n, (3, 5, 401))) for n in (1, 2, 8, 9, 20)),
        *((fused.test_a_sum_its_norm_and_their_gradients_equal_the_plain_ones, (48, (5, 7), last)) for last in (0, 1)),
        (fused.test_a_sum_that_scales_its_branch_equals_the_plain_one, (48, (5, 7), 24)),
        *((layer.test_a_mixer_and_its_gradients_equal_the_formula, (length, NARROW)) for length in (2, 65)),
        *(
            (layer.test_a_mixer_after_a_carried_state_and_its_gradients_equal_the_formula, (length, NARROW))
            for length in (8, 65)
        ),
        (layer.test_a_token_in_one_kernel_equals_the_plain_attention, (65, (3, 24), True)),
        (layer.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (3, 5, 1, (3, 24), True)),
        (layer.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (2, 9, 2, (3, 24), False)),
        (layer.test_swiglu_and_its_gradient_equal_the_plain_ones, ((3, 5, 96),)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_equals_the_slow_reference(check: Callable[..., None], case: tuple[Any, ...], dtype: Any) -> None:
    check(*case, dtype)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    ("check", "case"),
    [
        (fused.test_x_may_be_a_slice_and_transposed, ()),
        (layer.test_rotation_takes_gradients_of_any_layout, ()),
        *((fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, length, NARROW)) for length in (1, 50)),
        (fused.test_only_a_stack_without_gradient_leaves_a_norm_to_the_next_layer_and_equals_the_plain_one, ()),
        (fused.test_the_fused_head_equals_its_logits, (100,)),
        (fused.test_a_small_factor_of_the_loss_keeps_its_digits_in_the_gradient_of_an_fp16_head, ()),
        *((fused.test_an_iteration_judged_by_kernels_equals_the_plain_rule, ((6, 8, 48), stop)) for stop in STOPS),
        *((fused.test_a_layer_solved_at_once_equals_its_blocks_one_by_one, (stop, torch.float16)) for stop in STOPS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_equals_the_slow_reference_in_fp32(check: Callable[..., None], case: tuple[Any, ...]) -> None:
    check(*case, *([torch.float32] if "dtype" in check.__annotations__ else []))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("sizes", ["small", "odd", "narrow", "llama", "llama-odd"])
def test_a_stack_in_a_few_kernels_per_layer_equals_the_plain_one(sizes: str) -> None:
    decoding.check_stack(sizes)


@pytest.mark.usefixtures("_interpreted")
@torch.no_grad()
def test_the_next_token_is_first_checked_after_as_many_iterations_as_the_last_one_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "Recorder", EagerRecorder)
    model = decoding.model_of("narrow", num_hidden_layers=1)
    solver = replace(model.solver, tol=0.05, eval_max_iter=40)
    model.solver = solver
    base, embedding = model.backbone, torch.randn(3, 1, 1, 48)
    _, x = decoding.token_input(model)
    graph = blocks.BlockGraph(blocks.BlockSetting.of(base, embedding[0]), base, x.prefix)
    assert graph._token_stack is not None
    replays, iterate, prefix, last = 0, graph._graphs["iterate 0"].replay, x.prefix, 0

    def counted() -> None:
        nonlocal replays
        replays += 1
        iterate()

    graph._graphs["iterate 0"].replay = counted
    for token in embedding:
        graph.begin(token)
        stats, replays_before = graph.solve(), replays
        replays = 0
        with selection.kernels("torch"):
            f = StackMap(base, base.stack_input(token, None, None, prefix))
            z, prefix, plain = evaluation_pass(f, torch.zeros_like(token), solver, prefix)
        assert decoding.relative_error(graph.close(), z) < 1e-4
        assert torch.equal(stats.num_iter + 1, plain.f_evaluations)  # the closing f counts too
        most = int(stats.num_iter.max())
        assert replays_before == max(most, last - 1, blocks.CHECK_EVERY)
        last = most


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(("batch", "has_stack"), [(1, True), (2, False)])
@torch.no_grad()
def test_several_sequences_keep_the_kernels_that_are_faster_for_them(
    monkeypatch: pytest.MonkeyPatch, batch: int, has_stack: bool
) -> None:
    monkeypatch.setattr(blocks, "Recorder", EagerRecorder)
    model = decoding.model_of("narrow", num_hidden_layers=1)
    _, x = decoding.token_input(model, batch)
    graph = blocks.BlockGraph(
        blocks.BlockSetting.of(model.backbone, torch.randn(batch, 1, 48)), model.backbone, x.prefix
    )
    assert (graph._token_stack is not None) == has_stack


@pytest.mark.usefixtures("_interpreted")
def test_the_kernel_that_solves_all_blocks_has_no_wider_convolution() -> None:
    injection, out_proj = torch.zeros(4, 16, 400, dtype=torch.float16), torch.zeros(64, 128, dtype=torch.float16)
    sizes = (32, 1, 64)
    fits = [selection.search_runs_on_triton(injection, out_proj, sizes, taps, 8, "token") for taps in (2, 4, 5)]
    assert fits == [True, True, False]


@pytest.mark.usefixtures("_interpreted")
@torch.no_grad()
def test_a_stack_that_these_kernels_cannot_evaluate_keeps_its_own() -> None:
    model = decoding.model_of("small").backbone
    weights = tuple(layer.weights() for layer in model.layers)
    assert model.token_stack(weights) is not None
    assert model.token_stack((None, weights[1])) is None  # the modules of a layer must be called
    with selection.kernels("torch"):
        assert model.token_stack(weights) is None
    assert model.half().token_stack(tuple(layer.weights() for layer in model.layers)) is None
    for sizes, change in (("small", {"head_dim": 8}), ("llama", {"num_key_value_heads": 2})):
        other = decoding.model_of(sizes, **change).base
        assert other.token_stack(tuple(layer.weights() for layer in other.layers)) is None


@pytest.mark.usefixtures("_interpreted")
def test_a_card_with_little_shared_memory_solves_blocks_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = SimpleNamespace(multi_processor_count=108, shared_memory_per_block_optin=163 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    with pytest.raises(AssertionError, match="assert None is not None"):
        fused.test_a_layer_solved_at_once_equals_its_blocks_one_by_one("token", torch.float16)


ROOT = Path(__file__).parents[3]
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


@pytest.mark.integration
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, target], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "kernels that were not compiled: set()\n"), done.stderr


def compile_all(target: str) -> set[str]:
    """Names of kernels that no operation launched; an error of the compiler is raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    run, compiled = JITFunction.run, set()

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled.add(f"{self.fn.__module__}.{self.__name__}")
        run(self, *arguments, warmup=True, **options)

    JITFunction.run = compile_only
    there = {"get_current_target": GPUTarget(*TARGETS[target]), "get_current_device": 0, "get_current_stream": 0}
    triton.runtime.driver.set_active(SimpleNamespace(**{k: lambda *_, v=v: v for k, v in there.items()}))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        multi_processor_count=100, shared_memory_per_block_optin=2**18
    )
    products = importlib.import_module("implicit_llm.kernels.triton.token_products")
    selection._missing_for_triton = lambda: None
    selection._unfit = lambda x: "fp64" if x.dtype == torch.float64 else None
    with selection.kernels("triton"):
        for check, case in (
            (fused.test_a_norm_and_its_gradients_equal_the_plain_ones, (48, (5, 7), True)),
            (fused.test_a_sum_its_norm_and_their_gradients_equal_the_plain_ones, (48, (5, 7), False)),
            (fused.test_a_sum_that_scales_its_branch_equals_the_plain_one, (48, (5, 7), 24)),
            (fused.test_the_gradients_of_an_injection_are_summed_at_once, (20, (3, 5, 401))),
            (layer.test_a_mixer_and_its_gradients_equal_the_formula, (65, (64, 1, 128))),
            (fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, 50, (64, 1, 128))),
            (fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, 1, (64, 1, 128))),
            (fused.test_the_fused_head_equals_its_logits, (100,)),
            (layer.test_a_token_in_one_kernel_equals_the_plain_attention, (65, (1, 64), True)),
            (layer.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (3, 5, 1, (1, 64), True)),
            (layer.test_swiglu_and_its_gradient_equal_the_plain_ones, ((3, 5, 96),)),
            (fused.test_a_layer_solved_at_once_equals_its_blocks_one_by_one, ("token",)),
        ):
            with suppress(AssertionError, FloatingPointError):  # nothing has computed anything
                check(*case, torch.bfloat16)
        for early in {False, target == "sm_90"}:
            products.starts_early = lambda device, early=early: early
            for sizes in ("two", "llama-two"):
                with suppress(AssertionError):
                    decoding.check_stack(sizes)
        with suppress(AssertionError):
            fused.test_an_iteration_judged_by_kernels_equals_the_plain_rule((6, 8, 48), "sequence")
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "implicit_llm").rglob("triton/*.py")]
    modules = [importlib.import_module(".".join(path.parts)) for path in paths]
    functions = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return {f"{f.fn.__module__}.{f.__name__}" for f in functions if f.__name__.endswith("_kernel")} - compiled


if __name__ == "__main__":
    sys.stdout.write(f"kernels that were not compiled: {compile_all(sys.argv[1])}\n")
