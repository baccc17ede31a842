"""Rotary positions, attention in a room for keys and SwiGLU in plain PyTorch, and which calls the kernels take."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from implicit_llm.kernels import selection
from implicit_llm.kernels.operations import Room, room_attention, rotated_heads, swiglu
from implicit_llm.models.llama3 import rope_tables

HEADS, WIDTH, BATCH, LENGTH = 3, 8, 2, 9


def inputs() -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """qkv, injection and rotary tables."""
    torch.manual_seed(0)
    qkv, injection = torch.randn(2, BATCH, LENGTH, 3 * HEADS * WIDTH, dtype=torch.float64)
    return qkv, injection, rope_tables(torch.arange(LENGTH)[None], WIDTH, 10_000.0, torch.float64)


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    qkv, _, near = inputs()
    q, k, _ = rotated_heads(qkv, None, near, HEADS)
    far = rope_tables(100 + torch.arange(LENGTH)[None], WIDTH, 10_000.0, torch.float64)
    far_q, far_k, _ = rotated_heads(qkv, None, far, HEADS)
    assert not torch.allclose(q, far_q)
    torch.testing.assert_close(q @ k.mT, far_q @ far_k.mT, rtol=1e-4, atol=1e-4)  # angles are in fp32


@pytest.mark.parametrize("split", [(9,), (1,) * 9, (4, 1, 4)])
def test_blocks_in_a_room_attend_like_the_whole_sequence(split: tuple[int, ...]) -> None:
    qkv, injection, rope = inputs()
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


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a GPU that is not there."""
    with FakeTensorMode():
        return torch.empty(shape, device="cuda", dtype=dtype)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "selected_kernels", lambda: "triton")


@torch.no_grad()
def test_a_single_token_in_a_room_is_one_kernel(triton: None) -> None:
    room = (fake(4, 12, 384, 64), fake(4, 12, 384, 64))
    assert selection.room_attention_runs_on_triton(fake(4, 1, 2304), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 2, 2304), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304, dtype=torch.float64), room)
    assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304), (room[0].transpose(1, 2), room[1]))
    with torch.enable_grad():
        assert not selection.room_attention_runs_on_triton(fake(4, 1, 2304), room)


def test_rotation_and_swiglu_are_kernels_with_and_without_gradient(triton: None) -> None:
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            assert selection.rotation_runs_on_triton(fake(8, 2048, 2304, dtype=torch.bfloat16))
            assert selection.swiglu_runs_on_triton(fake(8, 2048, 4096, dtype=torch.bfloat16))
    assert not selection.rotation_runs_on_triton(torch.zeros(1, 4, 24))
