"""Which kernels run: the choice for the process, the rules for a call, and what is imported."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from implicit_llm.kernels import selection
from implicit_llm.kernels.selection import (
    KernelsUnavailable,
    kernels,
    select_kernels,
    select_kernels_for,
    selected_kernels,
)
from implicit_llm.models.mamba2.causal_conv import causal_conv
from tests.refusals import refused

# What the packages look like on a GPU machine, except that nothing computes and that mamba_ssm/__init__ must not run.
FAKE_PACKAGES = {
    "triton/__init__.py": "",
    "mamba_ssm/__init__.py": "raise ImportError('selective_scan_cuda')",
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/ssd_combined.py": "def mamba_chunk_scan_combined(*args, **kwargs): ...",
    "causal_conv1d/__init__.py": "def causal_conv1d_fn(*args, **kwargs): ...",
}
CAUSAL_CONV = [name for name in FAKE_PACKAGES if name.startswith("causal_conv1d/")]
PACKAGES = {name.partition("/")[0] for name in FAKE_PACKAGES}


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selection._Process, "backend", None)
    monkeypatch.setattr(selection._Process, "reasons", frozenset())
    monkeypatch.delenv(selection.ENVIRONMENT, raising=False)
    selection.missing_of_mamba_ssm.cache_clear()
    selection.mamba_functions.cache_clear()
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_missing_for_triton", lambda: None)
    monkeypatch.setattr(selection, "missing_of_mamba_ssm", lambda: None)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def write_packages(directory: Path, changes: dict[str, str | None]) -> None:
    for name, text in {**FAKE_PACKAGES, **changes}.items():
        if text is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with an H100 as far as `selection` can see; its packages are those written to the path returned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict(sys.modules):
        for name in list(sys.modules):
            if name.partition(".")[0] in PACKAGES:
                del sys.modules[name]
        yield tmp_path
    selection.mamba_functions.cache_clear()


def test_auto_takes_torch_without_a_gpu_and_says_so_once(bare: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=selection.__name__):
        assert [selected_kernels() for _ in range(3)] == ["torch"] * 3
        select_kernels("auto")
    assert [record.getMessage() for record in caplog.records] == ["kernels: torch (PyTorch sees no NVIDIA or ROCm GPU)"]


def test_the_environment_decides_for_auto_and_the_caller_over_it_and_a_with_block_for_its_time(
    capable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert select_kernels("auto") == "triton"
    monkeypatch.setenv(selection.ENVIRONMENT, "torch")
    assert select_kernels("auto") == "torch"
    with kernels("triton") as backend:
        assert backend == selected_kernels() == "triton"
    assert selected_kernels() == "torch"
    assert select_kernels("triton") == selected_kernels() == "triton"


def test_a_job_on_the_cpu_of_a_machine_with_a_gpu_takes_torch(capable: None) -> None:
    assert select_kernels_for("cpu", "auto") == "torch"
    assert select_kernels_for("cpu", "triton") == "triton"
    assert select_kernels_for("cuda", "auto") == "triton"


def test_a_wish_for_triton_that_cannot_be_met_is_an_error_of_one_line(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(selection.ENVIRONMENT, "triton")
    with refused(r"IMPLICIT_LLM_KERNELS.*no NVIDIA or ROCm GPU.*choose torch", KernelsUnavailable):
        selected_kernels()
    with pytest.raises(KernelsUnavailable, match="caller's choice"):
        select_kernels("triton")


def test_an_unknown_name_is_an_error_that_lists_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.ENVIRONMENT, "cuda")
    message = r"'cuda' in the environment variable.*torch, triton, mamba_ssm, reference or auto"
    with pytest.raises(KernelsUnavailable, match=message):
        select_kernels()


def test_torch_is_selected_without_looking_at_the_packages(gpu_machine: Path) -> None:
    write_packages(gpu_machine, dict.fromkeys(FAKE_PACKAGES, "raise AssertionError('imported')"))
    assert select_kernels("torch") == "torch"


def takes_published_kernels() -> bool:
    return selection.ssd_runs_on_triton(fake(2, 256, 16, 64), fake(2, 256, 1, 128))


def test_mamba_ssm_is_loaded_for_the_first_call_without_running_its_package(gpu_machine: Path) -> None:
    write_packages(gpu_machine, {})
    assert select_kernels("auto") == "triton"
    assert "mamba_ssm.ops.triton.ssd_combined" not in sys.modules
    assert takes_published_kernels()
    assert "mamba_ssm.ops.triton.ssd_combined" in sys.modules


def test_by_the_choice_of_mamba_ssm_every_mixer_runs_on_it_and_the_rest_on_our_kernels(gpu_machine: Path) -> None:
    write_packages(gpu_machine, {})
    mixer = (fake(2, 8, 2320), None, (64, 1, 128), 4)
    with kernels("mamba_ssm"):
        assert takes_published_kernels()
        assert selection.conv_runs_on_triton(fake(2, 8, 1280), fake(1280, 4))
        assert selection.norm_runs_on_triton(fake(2, 8, 256))
        assert not selection.trained_scan_runs_on_triton(*mixer)
        with torch.no_grad():
            assert not selection.scan_runs_on_triton(*mixer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict.fromkeys(CAUSAL_CONV), "causal_conv1d not installed: pip install"),
        ({"causal_conv1d/__init__.py": "import causal_conv1d_cuda"}, "causal_conv1d_cuda.*rebuild"),
        ({"mamba_ssm/ops/triton/ssd_combined.py": ""}, "mamba_chunk_scan_combined.*rebuild"),
    ],
)
def test_our_kernels_run_without_the_published_ones_whose_cure_is_named(
    changes: dict[str, str | None], message: str, gpu_machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_packages(gpu_machine, changes)
    assert select_kernels("auto") == "triton"
    assert selection.trained_scan_runs_on_triton(fake(2, 8, 2320), None, (64, 1, 128), 4)
    assert not takes_published_kernels()
    assert re.search(message, caplog.text)
    with pytest.raises(KernelsUnavailable, match=rf"mamba_ssm kernels.*{message}"):
        select_kernels("mamba_ssm")


@pytest.mark.parametrize(
    ("lacking", "named"),
    [("triton", "triton not installed: pip install triton"), ("a GPU of its age", r"sm_70.*sm_80")],
)
def test_a_package_that_is_missing_and_an_old_gpu_are_named(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, named: str
) -> None:
    if lacking == "triton":
        monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert select_kernels("auto") == "torch"
    with pytest.raises(KernelsUnavailable, match=named):
        select_kernels("triton")


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, row: int | None = None) -> torch.Tensor:
    """A tensor of a GPU that is not there, a slice of rows of that many entries if it is said."""
    with FakeTensorMode():
        strides = list(torch.empty(shape, device="meta").stride())
        if row is not None:
            strides[:2] = row * shape[1], row
        return torch.empty_strided(shape, strides, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_published_sizes_run_on_triton(dtype: torch.dtype, capable: None) -> None:
    assert selection.ssd_runs_on_triton(fake(512, 256, 16, 64, dtype=dtype), fake(512, 256, 1, 128, dtype=dtype))
    assert selection.conv_runs_on_triton(fake(512, 256, 1280, dtype=dtype), fake(1280, 4))
    assert selection.norm_runs_on_triton(fake(512, 256, 1024, dtype=dtype))


@pytest.mark.parametrize(
    ("x", "state", "reason"),
    [
        ((2, 8, 4, 16, torch.float64), 16, "torch.float64"),
        ((2, 8, 4, 512, torch.bfloat16), 16, "wider than 256"),
        ((2, 8, 4, 16, torch.bfloat16), 512, "wider than 256"),
        ((4096, 4096, 16, 64, torch.bfloat16), 128, r"2\^31"),
        ((2, 8, 4, 16, torch.float32), 16, "TF32"),
    ],
)
def test_what_the_ssd_kernels_cannot_serve_goes_to_torch_and_is_said_once(
    x: tuple, state: int, reason: str, capable: None, caplog: pytest.LogCaptureFixture
) -> None:
    *shape, dtype = x
    for _ in range(3):
        assert not selection.ssd_runs_on_triton(fake(*shape, dtype=dtype), fake(*shape[:2], 1, state, dtype=dtype))
    (warning,) = caplog.records
    assert re.match(rf"kernels: torch instead of triton for ssd.*{reason}", warning.getMessage())


@pytest.mark.parametrize(("precision", "is_tf32"), [("highest", False), ("high", True)])
def test_fp32_takes_the_kernels_of_its_products(precision: str, is_tf32: bool, capable: None) -> None:
    """mamba_ssm's multiply in TF32, and the gradient of the mixer is exact in full fp32 alone."""
    torch.set_float32_matmul_precision(precision)
    x, projected = fake(2, 8, 4, 16, dtype=torch.float32), fake(2, 8, 2 * 64 + 2 * 128 + 1, dtype=torch.float32)
    assert selection.ssd_runs_on_triton(x, fake(2, 8, 1, 16)) == is_tf32
    assert selection.trained_scan_runs_on_triton(projected, None, (64, 1, 128), 4) != is_tf32


SIZES = (64, 1, 128)
LONGEST = 2**20  # tokens of 2,048 entries that an offset of 31 bits reaches


@pytest.mark.parametrize(
    ("batch", "length", "reason"),
    [
        (5, LONGEST, None),  # the start of a sequence is found with 64 bits
        (5, LONGEST + 1, r"5 x 1048577 x 2048 entries take offsets of 2\^31 or more: shorter blocks"),
        (65_535, 8, None),
        (65_536, 8, "65536 x 8 x 2048 entries take more than 65535 programs along an axis: .*fewer sequences"),
    ],
)
def test_a_mixer_whose_offsets_or_programs_would_overflow_goes_to_torch_which_is_said(
    batch: int, length: int, reason: str | None, capable: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert selection.trained_scan_runs_on_triton(fake(batch, length, 2048), None, SIZES, 4) == (reason is None)
    with torch.no_grad():
        assert selection.scan_runs_on_triton(fake(batch, length, 2048), None, SIZES, 4) == (reason is None)
    assert len(caplog.records) == (0 if reason is None else 2)
    assert re.search(reason or "", caplog.text)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "state", "longest"),
    [
        (32, 1, 64, 128, LONGEST),  # x has 2,048 entries a token
        (8, 1, 64, 256, LONGEST),  # B is a slice of rows of 2,048
        (64, 1, 64, 256, LONGEST // 2),  # states of a chunk of 256 tokens
        (16, 16, 16, 16, LONGEST // 2),  # scores of 16 groups
    ],
)
def test_the_published_scan_takes_no_tensor_that_its_offsets_do_not_reach(
    heads: int, groups: int, width: int, state: int, longest: int, capable: None
) -> None:
    for length in (longest, longest + 1):
        x, B = fake(1, length, heads, width), fake(1, length, groups, state, row=2048 if heads == 8 else None)
        assert selection.ssd_runs_on_triton(x, B) == (length == longest)


def test_the_published_scan_takes_no_more_chunks_than_programs_fit_along_an_axis(capable: None) -> None:
    for batch in (65_535, 65_536):
        assert selection.ssd_runs_on_triton(fake(batch, 8, 1, 16), fake(batch, 8, 1, 16)) == (batch == 65_535)


def test_the_published_convolution_takes_no_slice_that_its_offsets_do_not_reach(capable: None) -> None:
    for length in (LONGEST, LONGEST + 1):
        x = fake(1, length, 1280, row=2048)
        assert selection.conv_runs_on_triton(x, fake(1280, 4)) == (length == LONGEST)


def test_kernels_that_find_every_token_with_64_bits_have_no_largest_tensor(capable: None) -> None:
    x = fake(4, LONGEST, 2048)
    assert selection.norm_runs_on_triton(x)
    assert selection.swiglu_runs_on_triton(x)
    assert selection.softmax_runs_on_triton(x)
    assert selection.rotation_runs_on_triton(x)
    assert selection.judge_runs_on_triton(x, "token")
    assert not selection.judge_runs_on_triton(fake(65_536, 1, 64), "token")


@pytest.mark.parametrize(
    ("length", "valid", "sizes", "taps", "is_trained", "is_plain"),
    [
        (1, None, SIZES, 4, True, True),
        (512, None, SIZES, 4, True, True),
        (4097, None, SIZES, 4, True, True),
        (8, torch.ones(2, 8), SIZES, 4, False, False),
        (8, None, SIZES, 5, False, False),
        (8, None, (128, 1, 128), 4, False, True),  # the gradient holds half as large a state
        (8, None, (64, 1, 256), 4, False, True),
        (8, None, (48, 1, 64), 4, False, False),
        (8, None, (64, 1, 8), 4, False, False),
    ],
)
def test_a_mixer_is_one_kernel_where_its_state_fits_and_nothing_is_padded(
    length: int, valid: torch.Tensor | None, sizes: tuple, taps: int, is_trained: bool, is_plain: bool, capable: None
) -> None:
    projected = fake(2, length, 2320)
    assert selection.trained_scan_runs_on_triton(projected, valid, sizes, taps) == is_trained
    assert not selection.scan_runs_on_triton(projected, valid, sizes, taps)  # it has no gradient
    with torch.no_grad():
        assert selection.scan_runs_on_triton(projected, valid, sizes, taps) == is_plain


@pytest.mark.parametrize(("channels", "width"), [(12, 4), (16, 5), (16, 1)])
def test_convolutions_that_are_not_built_go_to_torch(channels: int, width: int, capable: None) -> None:
    assert not selection.conv_runs_on_triton(fake(2, 8, channels), fake(channels, width))


def test_tensors_on_the_cpu_are_computed_by_torch_under_triton(capable: None) -> None:
    x = torch.ones(1, 4, 8)
    y, _ = causal_conv(x, torch.ones(8, 4), None)
    assert selected_kernels() == "triton"
    assert y[0, :, 0].tolist() == [1, 2, 3, 4]


@torch.no_grad()
def test_a_single_token_in_a_room_is_one_kernel(capable: None) -> None:
    room = (fake(4, 12, 384, 64), fake(4, 12, 384, 64))
    assert selection.room_attention_runs_on_triton(fake(4, 1, 2304), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 2, 2304), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304, dtype=torch.float64), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304), (room[0].transpose(1, 2), room[1]))
    with torch.enable_grad():
        assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304), room)


def test_rotation_and_swiglu_are_kernels_with_and_without_gradient(capable: None) -> None:
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            assert selection.rotation_runs_on_triton(fake(8, 2048, 2304))
            assert selection.swiglu_runs_on_triton(fake(8, 2048, 4096))
    assert not selection.rotation_runs_on_triton(torch.zeros(1, 4, 24))
