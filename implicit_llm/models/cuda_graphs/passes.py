"""Whole sequences solved block by block by the graphs of blocks.py: in training, and in evaluation on a GPU.

Shapes: `B` batch, `L` length, `W` tokens of a block, `D` model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_llm.models.cuda_graphs.blocks import BlockGraph, Setting, can_replay
from implicit_llm.models.stack import Prefix
from implicit_llm.solver.stats import BlockStats, SolverStats, gather_blocks

if TYPE_CHECKING:
    from implicit_llm.models.backbone import ImplicitModel

MIN_TOKENS, MIN_BLOCKS = 16, 4  # capturing graphs costs as much as a few blocks without them


def can_replay_training(model: ImplicitModel, embedding_BLD: Tensor) -> bool:
    """Whether the solver's iterations of a training pass can come from graphs."""
    solver = model.solver
    if solver is None or solver.mode != "fixed_point":
        return False
    with torch.no_grad():
        if not can_replay(model, embedding_BLD):
            return False
    length = embedding_BLD.shape[1]
    width = solver.block_len or length
    return width >= length or length % width == 0


@torch.no_grad()
def training_solve(
    model: ImplicitModel, embedding_BLD: Tensor, masks: tuple[Tensor, ...] | None
) -> tuple[Tensor, list[tuple[int, BlockStats]]]:
    """As `solver.passes.training_solve`: z (B, L, D) and the statistics of the blocks."""
    solver, length = model.solver, embedding_BLD.shape[1]
    assert solver is not None
    width = min(solver.block_len or length, length)
    by_blocks = width < length
    first, has_masks = embedding_BLD[:, :width], masks is not None
    graph = _graph_of(model, first, None, with_state=by_blocks, has_masks=has_masks, room_tokens=length)
    parts, blocks = [], []
    for start in range(0, length, width):
        here = slice(start, start + width)
        graph.begin(embedding_BLD[:, here], None if masks is None else tuple(mask[:, here] for mask in masks))
        blocks.append((width, graph.solve()))
        parts.append(graph.close().clone() if by_blocks else graph.best_BWD)
    return torch.cat(parts, dim=1) if by_blocks else parts[0], blocks


def can_replay_evaluation(model: ImplicitModel, embedding_BLD: Tensor, width: int) -> bool:
    """Whether an evaluation pass in blocks of `width` tokens without padding can come from graphs, and pays."""
    length = embedding_BLD.shape[1]
    pays = length >= MIN_TOKENS if width == 1 else length >= MIN_BLOCKS * width
    return pays and length % width == 0 and can_replay(model, embedding_BLD)


@torch.no_grad()
def evaluation(
    model: ImplicitModel, embedding_BLD: Tensor, prefix: Prefix | None, width: int, *, positions: bool
) -> tuple[Tensor, Prefix, SolverStats]:
    """As `solver.passes.evaluation_pass`: z* (B, L, D), the prefix that ends with it, and the statistics."""
    graph = _graph_of(model, embedding_BLD[:, :width], prefix, room_tokens=embedding_BLD.shape[1])
    parts, blocks = [], []
    for block_BWD in embedding_BLD.split(width, dim=1):
        graph.begin(block_BWD)
        blocks.append((width, graph.solve()))
        parts.append(graph.close().clone())
    end = graph.prefix().without_room()
    end = replace(end, layers=tuple(tuple(state.clone() for state in layer) for layer in end.layers))
    return torch.cat(parts, dim=1), end, gather_blocks(blocks, 1, positions=positions)


def _graph_of(
    model: ImplicitModel,
    embedding_BWD: Tensor,
    prefix: Prefix | None,
    *,
    with_state: bool = True,
    has_masks: bool = False,
    room_tokens: int = 0,
) -> BlockGraph:
    """The model's graph, at the beginning of a sequence that follows `prefix`; captured anew where none fits."""
    setting = Setting.of(model, embedding_BWD, with_state=with_state)
    kept = model.sequence_graphs.get(model.training)
    room = room_tokens + (0 if prefix is None else prefix.length) if with_state and model.has_growing_state else None
    if kept is None or kept.setting != setting or (kept.room or 0) < (room or 0):
        model.sequence_graphs.pop(model.training, None)
        del kept  # its memory is free before the next is captured
        before = prefix if prefix is not None or not with_state else _empty_prefix(model, embedding_BWD)
        kept = BlockGraph(setting, model, before, room=room, has_masks=has_masks)
        model.sequence_graphs[model.training] = kept
    else:
        kept.restart(prefix)
    kept.refresh_weights()
    return kept


def _empty_prefix(model: ImplicitModel, embedding_BWD: Tensor) -> Prefix:
    """The state before the first token, in tensors as a block leaves them."""
    x = model.stack_input(embedding_BWD, None, None, None)
    layers = model.apply_stack(torch.zeros_like(embedding_BWD), x, return_states=True)[1]
    if model.has_growing_state:
        return Prefix(tuple(tuple(state[:, :, :0] for state in layer) for layer in layers), 0)
    return Prefix(tuple(tuple(torch.zeros_like(state) for state in layer) for layer in layers), 0)
