"""Select the kernels that run; no other module decides this.

`torch` is plain PyTorch, for every device and dtype, with explicit gradients. `reference` has the same formulas, but
autograd records every operation, as torch.func, forward mode and second derivatives require; it takes more time and
memory. `triton` runs our own kernels, on NVIDIA GPUs from sm_80 up and on ROCm. Mamba2 mixers that our kernels cannot
serve use mamba_ssm's SSD and causal_conv1d's convolution if these packages are installed. `mamba_ssm` requires these
packages and uses them for every mixer that they can serve; otherwise it equals `triton`. One of the four is selected
for the whole process (`selected_kernels`). A call that the selected kernels cannot serve uses `torch`, by the rules at
the end of this file. Each reason that a rule passes to `_decide` is logged once.

triton, mamba_ssm and causal_conv1d are imported only if the selected kernels need them and a GPU for them exists.

Shapes: `B` batch, `L` length, `D` model, `E` columns of a projection, `I` inner, `H` heads, `P` head width, `G` groups,
`N` state, `C` channels, `K` width of the convolution, `T` tokens, `U` vocabulary, rounded up.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from implicit_llm_contracts.errors import UserError

Backend = Literal["torch", "triton", "mamba_ssm", "reference"]
KernelChoice = Literal["auto", "torch", "triton", "mamba_ssm", "reference"]

ENVIRONMENT = "IMPLICIT_LLM_KERNELS"
INSTALL = "pip install --no-build-isolation '.[cuda]' in the project's checkout"
_MAMBA_PACKAGES = ("mamba_ssm", "causal_conv1d", "einops")
_log = logging.getLogger(__name__)


class KernelsUnavailable(UserError, RuntimeError):
    """The requested kernels are unknown or cannot run here; the message names the reason and the fix."""

    failure_class = "env"


class _Process:
    """The backend selected in this process, and the reasons that were logged."""

    backend: Backend | None = None
    reasons: frozenset[str] = frozenset()


def selected_kernels() -> Backend:
    """Return the backend of this process; select it like `select_kernels("auto")` if no backend is selected yet.

    Raises: KernelsUnavailable.
    """
    return _Process.backend or select_kernels("auto")


def select_kernels(choice: KernelChoice = "auto") -> Backend:
    """Select the kernels of the whole process.

    `auto` uses IMPLICIT_LLM_KERNELS if it is set, else `triton` if it can run here, else `torch`.

    Raises: KernelsUnavailable for an unknown name, and if `triton` or `mamba_ssm` is requested and cannot run here.
    """
    asked, where = choice, "the caller's choice"
    if choice == "auto":
        asked, where = os.environ.get(ENVIRONMENT, "auto"), f"the environment variable {ENVIRONMENT}"  # type: ignore[assignment]
    if asked not in get_args(KernelChoice):
        names = ", ".join(get_args(Backend))
        raise KernelsUnavailable(f"unknown kernels {asked!r} in {where}: write {names} or auto")
    missing = None if asked in ("torch", "reference") else _missing_for_triton()
    if asked == "mamba_ssm":
        missing = missing or missing_of_mamba_ssm()
    if asked != "auto" and missing is not None:
        raise KernelsUnavailable(f"{asked} kernels, {where}, cannot run: {missing}; or choose torch")
    backend: Backend = asked if asked != "auto" else "triton" if missing is None else "torch"
    if backend != _Process.backend:
        _log.info("kernels: %s (%s)", backend, (missing or "found") if asked == "auto" else where)
    _Process.backend = backend
    return backend


def select_kernels_for(device: str, choice: KernelChoice) -> Backend:
    """Select kernels by `select_kernels`, except that `auto` for the device `cpu` selects `torch`.

    In that case the environment variable IMPLICIT_LLM_KERNELS is ignored. Raises: KernelsUnavailable.
    """
    if device == "cpu" and choice == "auto":
        _Process.backend = "torch"
        return "torch"
    return select_kernels(choice)


@contextmanager
def kernels(choice: KernelChoice) -> Iterator[Backend]:
    """Select kernels for a `with` block, then restore the previous ones; for tests and comparisons.

    Raises: KernelsUnavailable.
    """
    before = _Process.backend
    try:
        yield select_kernels(choice)
    finally:
        _Process.backend = before


def _missing_for_triton() -> str | None:
    """Return why the triton kernels cannot run on this machine and how to fix it; None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA or ROCm GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU is sm_{major}{minor} and they need sm_80 or newer"
    if importlib.util.find_spec("triton") is None:
        return "triton not installed: pip install triton"
    return None


def _mamba_module(name: str) -> ModuleType:
    """Import a module of mamba_ssm without mamba_ssm/__init__, which imports compiled parts that we do not need.

    An empty package becomes `mamba_ssm` in sys.modules, if it is not imported yet. Raises: any error of the import.
    """
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("mamba_ssm is not installed")
        package = ModuleType("mamba_ssm")
        package.__spec__ = importlib.machinery.ModuleSpec("mamba_ssm", None, is_package=True)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
        try:
            return importlib.import_module(f"mamba_ssm.{name}")
        except BaseException:
            del sys.modules["mamba_ssm"]
            raise
    return importlib.import_module(f"mamba_ssm.{name}")


@cache
def mamba_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the chunked scan of mamba_ssm and the convolution of causal_conv1d. Raises: any error of their import."""
    scan = _mamba_module("ops.triton.ssd_combined").mamba_chunk_scan_combined
    return scan, importlib.import_module("causal_conv1d").causal_conv1d_fn


@cache
def missing_of_mamba_ssm() -> str | None:
    """Return why the kernels of mamba_ssm and causal_conv1d cannot run here and how to fix it; None if they can."""
    absent = [name for name in _MAMBA_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: {INSTALL}"
    try:
        mamba_functions()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__} at the import of the kernels ({first_line}): rebuild them with {INSTALL}"
    return None


def is_reference() -> bool:
    """Return whether the `reference` kernels are selected, which are PyTorch's own operations without our gradients."""
    return selected_kernels() == "reference"


def _uses_triton() -> bool:
    return selected_kernels() in ("triton", "mamba_ssm")


# The rules. Each returns whether the selected kernels can serve a call. Most rules log why they cannot (`_decide`).

GROUPED = "fewer heads of keys and values than of queries"
MAX_WIDTH = 256  # of heads and states; tests/gpu tests no wider ones
# Offsets have 32 bits. Our kernels count them from the start of a sequence or token, whose address has 64 bits; the
# kernels of mamba_ssm and causal_conv1d count from the start of a tensor. Larger offsets give finite but wrong results.
MAX_OFFSET = 2**31
MAX_GRID = 65_535  # programs along the second or third axis of a launch
MIN_CHUNK = 32  # smallest number of positions that one program of a mixer processes in a long sequence
# mamba_ssm tunes its kernels for a minute for every chunk length, so there are few lengths, all multiples of its tiles.
PUBLISHED_CHUNKS = (64, 128, 256)
MAX_JUDGED_WIDTH = 8192  # of a token, because one program loads whole tokens
MAX_STATE_TILE = 128 * 128  # entries of the state that one program holds in registers
MAX_TRAINED_STATE_TILE = 64 * 128  # the same limit for kernels that also compute gradients
MAX_TAPS = 4  # width of the convolution
MAX_SEARCH_WIDTH = 256  # of a model, for the kernel that solves all blocks (`search_runs_on_triton`)
SEARCH_SHARED_BYTES = 192 * 1024  # needed by the same kernel; a block has 227 KiB on a Hopper GPU, 163 KiB on an A100
MAX_ROW_BYTES = 64 * 1024  # of the norm, because one block holds a whole row


def ssd_runs_on_triton(x_BLHP: Tensor, B_BLGN: Tensor) -> bool:
    """Return whether mamba_ssm's SSD runs; it multiplies fp32 in TF32, so fp32 needs PyTorch's permission for TF32."""
    if not _uses_triton():
        return False
    is_too_exact = x_BLHP.dtype == torch.float32 and not _is_tf32_allowed()
    limits = {
        "fp32 SSD multiplies in TF32, which torch.set_float32_matmul_precision('high') allows": is_too_exact,
        f"SSD with head or state wider than {MAX_WIDTH}": max(x_BLHP.shape[3], B_BLGN.shape[3]) > MAX_WIDTH,
    }
    reason = _unfit(x_BLHP) or _first(limits) or _too_large(x_BLHP, *_published_sizes(x_BLHP, B_BLGN))
    return _decide("ssd", reason or missing_of_mamba_ssm())


def conv_runs_on_triton(x_BLC: Tensor, weight_CK: Tensor) -> bool:
    if not _uses_triton():
        return False
    width = weight_CK.shape[1]
    limits = {
        f"convolution of width {width} (2 to 4 are built)": not 2 <= width <= 4,
        "convolution of channels that are no multiple of 8": x_BLC.shape[2] % 8 != 0,
    }
    return _decide(
        "conv", _unfit(x_BLC) or _first(limits) or _too_large(x_BLC, _extent(x_BLC)) or missing_of_mamba_ssm()
    )


def norm_runs_on_triton(x_BLD: Tensor) -> bool:
    if not _uses_triton():
        return False
    is_wide = x_BLD.shape[-1] * x_BLD.element_size() > MAX_ROW_BYTES
    return _decide("norm", _unfit(x_BLD) or _first({f"norm of rows over {MAX_ROW_BYTES} bytes": is_wide}))


def scan_runs_on_triton(projected_BLE: Tensor, valid_BL: Tensor | None, sizes: tuple[int, int, int], taps: int) -> bool:
    """Return whether our kernels compute a whole mixer; never with gradients enabled or with `valid_BL`.

    sizes: (P, G, N). taps: the width of the convolution.
    """
    if selected_kernels() != "triton" or torch.is_grad_enabled() or valid_BL is not None:
        return False
    return _decide("mixer", _unfit_mixer(projected_BLE, sizes, taps, MAX_STATE_TILE))


def trained_scan_runs_on_triton(
    projected_BLE: Tensor, valid_BL: Tensor | None, sizes: tuple[int, int, int], taps: int
) -> bool:
    """Return whether our kernels compute a whole mixer and its gradients; never with `valid_BL` or in TF32.

    These kernels compute no gradient of the state before the sequence. sizes, taps: see `scan_runs_on_triton`.
    """
    if selected_kernels() != "triton" or valid_BL is not None:
        return False
    # In TF32 our gradients of dt's bias and of A would be wrong by up to 3 %; mamba_ssm's are wrong by 0.2 %.
    if projected_BLE.dtype == torch.float32 and _is_tf32_allowed():
        return False
    return _decide("gradient of the mixer", _unfit_mixer(projected_BLE, sizes, taps, MAX_TRAINED_STATE_TILE))


def search_runs_on_triton(
    injection_BLE: Tensor, out_proj_DI: Tensor, sizes: tuple[int, int, int], taps: int, width: int, stop: str
) -> bool:
    """Return whether one kernel solves all blocks, of `width` tokens each, of a model with one layer; log nothing."""
    if selected_kernels() != "triton" or _unfit_mixer(injection_BLE, sizes, taps, MAX_TRAINED_STATE_TILE):
        return False
    batch, length, columns = injection_BLE.shape
    model_width, inner = out_proj_DI.shape
    card = torch.cuda.get_device_properties(injection_BLE.device)
    available = getattr(card, "shared_memory_per_block_optin", 0)  # ROCm has no such field
    return (
        available >= SEARCH_SHARED_BYTES
        and injection_BLE.element_size() == 2
        and _is_tile(model_width)
        and model_width <= MAX_SEARCH_WIDTH
        and inner % 128 == 0
        and sizes[1] == 1
        and sizes[2] % 64 == 0
        and stop in ("sequence", "token")
        and width in (4, 8, 16, 32)
        and length % width == 0
        and batch * width % 32 == 0
        and length * columns * (32 // width) <= MAX_OFFSET  # the entries of a program's sequences
    )


def token_products_run_on_triton(*weights: Tensor) -> bool:
    """Return whether `kernels.triton.token_products`, which has no gradient, can use these weights; log nothing."""
    return _uses_triton() and all(
        weight.dtype == torch.float32
        and _unfit(weight) is None
        and 1 < weight.shape[1] <= MAX_JUDGED_WIDTH
        and weight.numel() <= MAX_OFFSET
        for weight in weights
    )


def token_stack_runs_on_triton(in_proj_ED: Tensor, out_proj_DI: Tensor, sizes: tuple[int, int, int], taps: int) -> bool:
    """Return whether three kernels per layer evaluate a Mamba2 stack on one token; log nothing."""
    if selected_kernels() != "triton" or not token_products_run_on_triton(in_proj_ED, out_proj_DI):
        return False
    return _unfit_mixer(in_proj_ED.new_empty(1, 1, len(in_proj_ED)), sizes, taps, MAX_STATE_TILE) is None


def _unfit_mixer(projected_BLE: Tensor, sizes: tuple[int, int, int], taps: int, max_state: int) -> str | None:
    (batch, length, columns), (width, _, size) = projected_BLE.shape, sizes
    is_tile = _is_tile(width) and _is_tile(size) and max(width, size) <= MAX_WIDTH
    limits = {
        f"a state of {width} x {size} (powers of two from 16 to {MAX_WIDTH}, at most {max_state} entries)": (
            not is_tile or width * size > max_state
        ),
        f"convolution of width {taps} (at most {MAX_TAPS})": taps > MAX_TAPS,
    }
    programs = max(batch, -(-length // MIN_CHUNK))
    return _unfit(projected_BLE) or _first(limits) or _too_large(projected_BLE, length * columns, programs)


def judge_runs_on_triton(z_BLD: Tensor, stop: str) -> bool:
    """Return whether Triton kernels can apply `stop` to z; only the rules "sequence" and "token" have kernels.

    This rule logs nothing.
    """
    if not _uses_triton() or stop not in ("sequence", "token"):
        return False
    return _unfit(z_BLD) is None and z_BLD.shape[2] <= MAX_JUDGED_WIDTH and len(z_BLD) <= MAX_GRID


def room_attention_runs_on_triton(qkv_BLE: Tensor, room_BHSP: tuple[Tensor, Tensor]) -> bool:
    """Return whether one kernel runs a layer's attention between its projections, for one token without gradient.

    room_BHSP: the keys and the values of a cache, with room for later tokens.
    """
    if not _uses_triton() or torch.is_grad_enabled() or qkv_BLE.shape[1] != 1:
        return False
    batch, heads, room, width = room_BHSP[0].shape
    limits = {
        f"heads wider than {MAX_WIDTH}": width > MAX_WIDTH,
        GROUPED: qkv_BLE.shape[2] != 3 * heads * width,
        "room for keys in pieces": not all(kept.is_contiguous() for kept in room_BHSP),
    }
    reason = _unfit(qkv_BLE) or _first(limits) or _too_large(room_BHSP[0], room * width, batch)
    return _decide("attention", reason)


def rotation_runs_on_triton(qkv_BLE: Tensor, *, is_grouped: bool = False) -> bool:
    return _uses_triton() and _decide("rotation", GROUPED if is_grouped else _unfit(qkv_BLE))


def swiglu_runs_on_triton(gate_up: Tensor) -> bool:
    return _uses_triton() and _decide("swiglu", _unfit(gate_up))


def shared_gradient_runs_on_triton(shared: Tensor) -> bool:
    """Return whether one kernel sums the gradients of several uses of a tensor; false if it requires no gradient."""
    if not (torch.is_grad_enabled() and shared.requires_grad and _uses_triton()):
        return False
    return _decide("sum of gradients", _unfit(shared))


def softmax_runs_on_triton(logits_TU: Tensor) -> bool:
    return _uses_triton() and _decide("softmax", _unfit(logits_TU))


def _is_tile(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0


def _unfit(x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"tensors on {x.device.type}"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{x.dtype}"
    return None


def published_chunk(length: int) -> int:
    """Return the chunk length (positions) with which mamba_ssm's kernels process sequences of `length` positions."""
    return next((size for size in PUBLISHED_CHUNKS if size >= length), PUBLISHED_CHUNKS[-1])


def _published_sizes(x_BLHP: Tensor, B_BLGN: Tensor) -> tuple[int, int]:
    """Return two maxima of mamba_ssm's SSD and its gradient: entries of a tensor, and programs along an axis.

    SSD reads x and B, writes as much, and forms scores (B, C, G, Q, Q), states (B, C, H, P, N) and gradients of decays
    in blocks of 32 rows (B, H, C, Q / 32, Q). Here C is the number of chunks and Q their length.
    """
    (batch, length, heads, width), (groups, size) = x_BLHP.shape, B_BLGN.shape[2:]
    chunk = published_chunk(length)
    chunks = batch * -(-length // chunk)
    of_chunk = max(groups * chunk * chunk, heads * width * size, heads * (chunk // 32) * chunk)
    return max(_extent(x_BLHP), _extent(B_BLGN), chunks * of_chunk), chunks


def _extent(x: Tensor) -> int:
    """Return the number of entries in memory from the first entry of x to the last one, both included."""
    return 1 + sum((count - 1) * stride for count, stride in zip(x.shape, x.stride(), strict=True))


def _too_large(x: Tensor, entries: int, programs: int = 1) -> str | None:
    """Return a message if `entries` are too many for an offset or `programs` for an axis of a launch, else None."""
    if entries <= MAX_OFFSET and programs <= MAX_GRID:
        return None
    limit = "offsets of 2^31 or more" if entries > MAX_OFFSET else f"more than {MAX_GRID} programs along an axis"
    return f"{' x '.join(map(str, x.shape))} entries take {limit}: shorter blocks or fewer sequences would fit"


def _first(limits: Mapping[str, bool]) -> str | None:
    """Return the description of the first limit that is exceeded, or None."""
    return next((reason for reason, is_exceeded in limits.items() if is_exceeded), None)


def _decide(kernel: str, reason: str | None) -> bool:
    if reason is None:
        return True
    said = f"{kernel}: {reason}"
    if said not in _Process.reasons:
        _Process.reasons |= {said}
        _log.warning("kernels: torch instead of %s for %s", _Process.backend, said)
    return False


def _is_tf32_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        return matmul.allow_tf32
    except RuntimeError:  # raised by torch 2.9 and later if the newer setting contradicts this one
        return matmul.fp32_precision == "tf32"
