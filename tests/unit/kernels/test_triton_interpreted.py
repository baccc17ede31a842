"""Every Triton kernel of ours on the CPU, under Triton's interpreter: the smaller cases of the tests on GPUs.

In bf16 the interpreter truncates where a GPU rounds. It has no library of device functions, so that two of them have
stand-ins; tests/gpu runs the real ones.
"""

import importlib
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.kernels import selection
from tests.gpu import test_attention_kernels as attention
from tests.gpu import test_fused_kernels as fused
from tests.gpu import test_mixer_gradient as mixer
from tests.gpu import test_norm_kernels as norm

BOTH = (torch.float32, torch.float16)
NARROW = (16, 2, 16)  # P, G, N
STOPS = ("sequence", "token")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import triton.language as tl

    inputs = importlib.import_module("implicit_llm.kernels.triton.scan_inputs")
    stand_ins = SimpleNamespace(exp2=lambda value: tl.exp2(value), fast_dividef=operator.truediv)
    monkeypatch.setattr(inputs, "libdevice", stand_ins)
    monkeypatch.setattr(selection, "_missing_for_triton", lambda: None)
    monkeypatch.setattr(selection, "_unfit", lambda x: None if x.dtype in BOTH else f"{x.dtype}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with selection.kernels("triton"):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize(
    ("check", "case"),
    [
        *((norm.test_a_norm_and_its_gradients_equal_the_plain_ones, (48, (5, 7), gated)) for gated in (False, True)),
        *((mixer.test_a_mixer_and_its_gradients_equal_the_formula, (length, NARROW)) for length in (2, 65)),
        (attention.test_a_token_in_one_kernel_equals_the_plain_attention, (65, (3, 24), True)),
        (attention.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (3, 5, 1, (3, 24), True)),
        (attention.test_rotated_heads_and_their_gradients_equal_the_plain_ones, (2, 9, 2, (3, 24), False)),
        (attention.test_swiglu_and_its_gradient_equal_the_plain_ones, ((3, 5, 96),)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_equals_the_slow_reference(check: Callable[..., None], case: tuple[Any, ...], dtype: Any) -> None:
    check(*case, dtype)


@pytest.mark.parametrize(
    ("check", "case"),
    [
        (norm.test_x_may_be_a_slice_and_transposed, ()),
        (attention.test_rotation_takes_gradients_of_any_layout, ()),
        *((fused.test_a_mixer_in_one_kernel_equals_the_plain_one, (True, length, NARROW)) for length in (1, 50)),
        (fused.test_the_fused_head_equals_its_logits, (100,)),
        *((fused.test_an_iteration_judged_by_kernels_equals_the_plain_rule, ((6, 8, 48), stop)) for stop in STOPS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_equals_the_slow_reference_in_fp32(check: Callable[..., None], case: tuple[Any, ...]) -> None:
    check(*case, *([torch.float32] if "dtype" in check.__annotations__ else []))
