"""Compute rotary positions, one token's attention, and SwiGLU in one kernel each (imported only if Triton kernels run).

The solver evaluates a token many times at the same position. For each head of each sequence, one program rotates query
and key, writes key and value into the room (preallocated keys and values), and computes the attention to all keys
there. The program loads the position from the device, so that one CUDA graph serves every token, and loads only keys
that exist. Longer blocks use `rotated_heads`, which has a gradient, and PyTorch's attention.

SwiGLU stores only its input. Its backward pass computes silu(gate) again and writes the gradients of gate and up side
by side.

The plain PyTorch twin is `models.llama3.attention`.

Shapes: `B` batch, `L` length, `S` room for keys, `H` heads, `P` head width, `D` H P, `E` 3 D (query, key, value), `T`
tokens, `M` MLP width, `G` 2 M (gate, up).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import wide, wide_sum
from implicit_llm.kernels.triton.token_products import gdc_launch_dependents, gdc_wait

BLOCK_KEYS = 64
TOKEN_WARPS = 4
ROPE_ENTRIES = 8  # entries of each tile per thread: 16 bytes of bf16, the widest load of a GPU
MAX_WARPS = 8
SWIGLU_BLOCK, SWIGLU_WARPS = 1024, 4
FEW_TOKENS, SMALL_BLOCK = 256, 256  # with fewer tokens, smaller blocks occupy more of the GPU


def token_attention(
    qkv_B1E: Tensor,
    injection_B1E: Tensor | None,
    rope: tuple[Tensor, Tensor],
    room_BHSP: tuple[Tensor, Tensor],
    position_1: Tensor,
    launch: dict[str, Any] | None = None,
) -> Tensor:
    """Implement `llama3.attention.room_attention` for one token and as many heads of keys as of queries.

    The token's key and value are written into the room, which must be contiguous. There is no gradient.

    launch: `TokenProducts.launch` of `kernels.triton.token_products`, options with which this kernel may start while
        the kernel before it runs; None if it must not.
    """
    batch, _, columns = qkv_B1E.shape
    _, heads, size, width = room_BHSP[0].shape
    qkv_B1E = qkv_B1E.contiguous()
    out_B1D = qkv_B1E.new_empty(batch, 1, columns // 3)
    injection = qkv_B1E if injection_B1E is None else injection_B1E.contiguous()
    cos, sin = (table.contiguous() for table in rope)
    rope_stride = 0 if len(cos) == 1 else width // 2
    _token_kernel[(heads, batch)](
        qkv_B1E, injection, cos, sin, *room_BHSP, position_1, out_B1D,
        heads, size, rope_stride, math.log2(math.e) / math.sqrt(width),
        P=width, WIDTH=triton.next_power_of_2(width), KEYS=BLOCK_KEYS, HAS_INJECTION=injection_B1E is not None,
        **{"EARLY": False, "num_warps": TOKEN_WARPS} | (launch or {}),
    )  # fmt: skip
    return out_B1D


@triton.jit
def _token_kernel(
    qkv_ptr, injection_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, position_ptr, out_ptr,
    heads, room, rope_stride, scale,
    P: constexpr, WIDTH: constexpr, KEYS: constexpr, HAS_INJECTION: constexpr, EARLY: constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr).to(tl.int32)
    model = heads * P
    qkv_ptr += sequence * 3 * model + head * P
    injection_ptr += sequence * 3 * model + head * P
    keys_ptr += (sequence * heads + head) * room * P
    values_ptr += (sequence * heads + head) * room * P
    of_P = tl.arange(0, WIDTH)
    is_P = of_P < P
    is_first = of_P < P // 2
    partner = tl.where(is_first, of_P + P // 2, of_P - P // 2)
    at_angle = sequence * rope_stride + tl.where(is_first, of_P, partner)
    cos = wide(cos_ptr + at_angle, is_P)
    sin = wide(sin_ptr + at_angle, is_P)
    sin = tl.where(is_first, -sin, sin)
    if EARLY:
        gdc_wait()
    query = wide_sum(qkv_ptr, injection_ptr, of_P, is_P, HAS_INJECTION) * cos
    query += wide_sum(qkv_ptr, injection_ptr, partner, is_P, HAS_INJECTION) * sin
    key = wide_sum(qkv_ptr, injection_ptr, model + of_P, is_P, HAS_INJECTION) * cos
    key += wide_sum(qkv_ptr, injection_ptr, model + partner, is_P, HAS_INJECTION) * sin
    value = wide_sum(qkv_ptr, injection_ptr, 2 * model + of_P, is_P, HAS_INJECTION)
    # The new key and value are rounded as in the room, but used from registers; the loop loads only earlier ones.
    key, value = key.to(keys_ptr.dtype.element_ty), value.to(values_ptr.dtype.element_ty)
    tl.store(keys_ptr + position * P + of_P, key, is_P)
    tl.store(values_ptr + position * P + of_P, value, is_P)
    query *= scale  # includes log2(e), because the softmax uses exp2
    # Every row of a block of keys has its own softmax, and the rows are combined only at the end. All rows start with
    # the score of the new token, which keeps them finite, but only the first row counts the token's value.
    rows = tl.arange(0, KEYS)
    top = tl.zeros((KEYS,), dtype=tl.float32) + tl.sum(query * key.to(tl.float32), axis=0)
    total = tl.where(rows == 0, 1.0, 0.0)
    mixed = tl.where(rows == 0, 1.0, 0.0)[:, None] * value.to(tl.float32)[None, :]
    for start in range(0, position, KEYS):
        row = start + rows
        is_there = row < position
        at = row[:, None] * P + of_P[None, :]
        mask = is_there[:, None] & is_P[None, :]
        old_keys = wide(keys_ptr + at, mask)
        old_values = wide(values_ptr + at, mask)
        score = tl.where(is_there, tl.sum(old_keys * query[None, :], axis=1), -float("inf"))
        new_top = tl.maximum(top, score)
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top)
        total = total * shrink + weight
        mixed = mixed * shrink[:, None] + old_values * weight[:, None]
        top = new_top
    share = tl.exp2(top - tl.max(top, axis=0))
    out = tl.sum(mixed * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out_ptr + sequence * model + head * P + of_P, out, is_P)


def rotated_heads(
    qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `llama3.attention.rotated_heads` for as many heads of keys and values as of queries."""
    return _RotatedHeads.apply(qkv_BLE, injection_BLE, *rope, heads)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BLE: Tensor, injection_BLE: Tensor | None, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.injection_dtype = None if injection_BLE is None else injection_BLE.dtype
        given = _by_head(qkv_BLE.contiguous(), heads)
        # The value gets a new tensor only if an injection is added to it; else it is a view of the input.
        turned = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[: _count(injection_BLE)]]
        _turn(given, tuple(turned), (cos, sin), injection_BLE)
        q, k, v = (*turned, *given[len(turned) :])
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_BHLP: Tensor) -> tuple[Tensor | None, ...]:
        given = [grad.transpose(1, 2) for grad in grads_BHLP]
        if given[0].stride(3) != 1 or len({grad.stride() for grad in given}) > 1:
            given = [grad.contiguous() for grad in given]
        batch, length, heads, width = given[0].shape
        gradient_BLE = given[0].new_empty(batch, length, 3 * heads * width)
        _turn(tuple(given), _by_head(gradient_BLE, heads), ctx.saved_tensors, is_backward=True)
        of_injection = None if ctx.injection_dtype is None else gradient_BLE.to(ctx.injection_dtype)
        return gradient_BLE, of_injection, None, None, None


def _count(injection_BLE: Tensor | None) -> int:
    return 2 if injection_BLE is None else 3


def _by_head(qkv_BLE: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return views (B, L, H, P) of query, key and value."""
    return qkv_BLE.view(*qkv_BLE.shape[:2], 3, heads, -1).unbind(2)


def _turn(
    given: tuple[Tensor, ...],
    turned: tuple[Tensor, ...],
    rope: tuple[Tensor, ...],
    injection_BLE: Tensor | None = None,
    *,
    is_backward: bool = False,
) -> None:
    """Write `given` + injection to `turned`; query and key (B, L, H, P) are rotated, in reverse if `is_backward`.

    The value is written only if `turned` has a third tensor. All tensors of `given` must have the same strides, and all
    tensors of `turned` too.
    """
    batch, length, heads, width = given[0].shape
    cos, sin = (table.contiguous() for table in rope)
    columns, rows = triton.next_power_of_2(width // 2), triton.next_power_of_2(heads)
    if batch * length == 0:
        return
    _turn_kernel[(batch * length,)](
        *given, given[0] if injection_BLE is None else injection_BLE.contiguous(), *turned[:2], turned[-1], cos, sin,
        *given[0].stride()[:3], *turned[0].stride()[:3], length, heads, 0 if len(cos) == 1 else length * width // 2,
        HALF=width // 2, COLUMNS=columns, HEADS=rows,
        HAS_INJECTION=injection_BLE is not None, HAS_VALUE=len(turned) == 3, IS_BACKWARD=is_backward,
        num_warps=min(max(rows * columns // (32 * ROPE_ENTRIES), 1), MAX_WARPS),
    )  # fmt: skip


@triton.jit
def _turn_kernel(
    q_ptr, k_ptr, v_ptr, injection_ptr, to_q_ptr, to_k_ptr, to_v_ptr, cos_ptr, sin_ptr,
    from_B, from_L, from_H, to_B, to_L, to_H, length, heads, rope_stride,
    HALF: constexpr, COLUMNS: constexpr, HEADS: constexpr,
    HAS_INJECTION: constexpr, HAS_VALUE: constexpr, IS_BACKWARD: constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    sequence, place = token // length, token % length
    head, column = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, COLUMNS)[None, :]
    at_angle = sequence * rope_stride + place * HALF + column
    cos = wide(cos_ptr + at_angle, column < HALF)
    sin = wide(sin_ptr + at_angle, column < HALF)
    if IS_BACKWARD:
        sin = -sin
    is_inside = (head < heads) & (column < HALF)
    at = sequence * from_B + place * from_L + head * from_H + column
    to = sequence * to_B + place * to_L + head * to_H + column
    part = heads * 2 * HALF
    q_first, q_second = _halves(q_ptr, injection_ptr, at, is_inside, HALF, HAS_INJECTION)
    _store_halves(to_q_ptr + to, q_first * cos - q_second * sin, q_second * cos + q_first * sin, is_inside, HALF)
    k_first, k_second = _halves(k_ptr, injection_ptr + part, at, is_inside, HALF, HAS_INJECTION)
    _store_halves(to_k_ptr + to, k_first * cos - k_second * sin, k_second * cos + k_first * sin, is_inside, HALF)
    if HAS_VALUE:
        v_first, v_second = _halves(v_ptr, injection_ptr + 2 * part, at, is_inside, HALF, HAS_INJECTION)
        _store_halves(to_v_ptr + to, v_first, v_second, is_inside, HALF)


@triton.jit
def _halves(heads_ptr, injection_ptr, at, is_inside, HALF: constexpr, HAS_INJECTION: constexpr):
    first = wide_sum(heads_ptr, injection_ptr, at, is_inside, HAS_INJECTION)
    return first, wide_sum(heads_ptr, injection_ptr, at + HALF, is_inside, HAS_INJECTION)


@triton.jit
def _store_halves(to_ptr, first, second, is_inside, HALF: constexpr):
    tl.store(to_ptr, first, is_inside)
    tl.store(to_ptr + HALF, second, is_inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Implement `llama3.attention.swiglu`."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows_TG = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _launch_swiglu(_swiglu_kernel, rows_TG, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows_TG = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _launch_swiglu(_swiglu_gradient_kernel, rows_TG, grad.contiguous(), gradient)
        return gradient


def _launch_swiglu(kernel: Any, rows_TG: Tensor, *others: Tensor) -> None:
    tokens, width = len(rows_TG), rows_TG.shape[1] // 2
    block = min(SMALL_BLOCK if tokens < FEW_TOKENS else SWIGLU_BLOCK, triton.next_power_of_2(width))
    if tokens:
        kernel[(tokens, triton.cdiv(width, block))](rows_TG, *others, width, BLOCK=block, num_warps=SWIGLU_WARPS)


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, width, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += token * 2 * width
    gate = wide(gate_up_ptr + column, column < width)
    up = wide(gate_up_ptr + width + column, column < width)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * width + column, out, column < width)


@triton.jit
def _swiglu_gradient_kernel(gate_up_ptr, grad_ptr, gradient_ptr, width, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += token * 2 * width
    gradient_ptr += token * 2 * width
    gate = wide(gate_up_ptr + column, column < width)
    up = wide(gate_up_ptr + width + column, column < width)
    grad = wide(grad_ptr + token * width + column, column < width)
    share = tl.sigmoid(gate)
    of_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    of_up = grad * gate * share
    tl.store(gradient_ptr + column, of_gate, column < width)
    tl.store(gradient_ptr + width + column, of_up, column < width)
