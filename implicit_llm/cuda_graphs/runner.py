"""Replay a model's passes on a GPU from CUDA graphs.

If no stored graph fits a pass, the runner captures a new one where this pays: for long sequences in evaluation, for
decoding after a few tokens, and for training with `replays_training`. Other passes run without graphs.

Shapes: `B` batch, `L` length, `W` tokens of a block, `D` model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from implicit_llm.cuda_graphs.blocks import BlockGraph, BlockSetting, empty_prefix
from implicit_llm.cuda_graphs.capture import CaptureFailed, autocast_dtype
from implicit_llm.cuda_graphs.training_step import StepGraph, StepSetting
from implicit_llm.models.backbone import ImplicitModel, StackMap
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.runner import Runner, Token, TrainingStep
from implicit_llm.models.stack import Prefix
from implicit_llm.solver.passes import Search
from implicit_llm.solver.stats import Block, SolverStats, gather_blocks
from implicit_llm_contracts.config.solver import SolverConfig

# The fewest blocks of one token, and of several tokens, for which graphs are used: a capture costs as much as a few
# blocks without graphs.
MIN_TOKENS, MIN_BLOCKS = 16, 4
EAGER_TOKENS = 4  # tokens decoded for a cache before its first capture, because a capture costs as much as a few tokens
ROOM_TOKENS = 256  # step by which the room for keys and values grows; each step needs a new capture

_log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def can_capture(model: ImplicitModel, device: torch.device) -> bool:
    """Return whether a capture can record the model: on a GPU, in no other capture, and if `calls_modules` is false."""
    return device.type == "cuda" and not model.calls_modules() and not torch.cuda.is_current_stream_capturing()


@dataclass
class Decoder:
    """The graphs that decode single tokens for one cache and carry its states.

    tokens: the number of tokens decoded so far. graph: None while tokens still run without a graph.
    """

    tokens: int = 0
    graph: BlockGraph | None = None


class GraphRunner(Runner):
    """A runner that replays decoding and evaluation in blocks; with `replays_training` it also replays training passes.

    If a capture fails, the model gets a plain `Runner` instead; with a reducer only if it fails in a training step.
    step: the graph of the newest whole training step. sequences: the graphs that solve blocks, in training (True) and
    in evaluation (False). decoders: the graphs for single tokens, by cache. token_graph: the newest graph for single
    tokens, which serves another cache once its own cache is deleted.
    """

    def __init__(self, replays_training: bool = False) -> None:
        self.replays_training = replays_training
        self.step: StepGraph | None = None
        self.sequences: dict[bool, BlockGraph] = {}
        self.decoders: WeakKeyDictionary[ConvergedStateCache, Decoder] = WeakKeyDictionary()
        self.token_graph: BlockGraph | None = None

    def __reduce__(self) -> tuple[type[GraphRunner], tuple[bool]]:
        return type(self), (self.replays_training,)  # a copy of a model captures its own graphs

    def training_step(
        self,
        model: ImplicitForCausalLM,
        ids_BL: Tensor,
        labels_BL: Tensor,
        cache: ConvergedStateCache | None,
        *,
        aligned: bool,
        return_logits: bool,
    ) -> TrainingStep | None:
        if not self._can_step(model, ids_BL, cache):
            return None
        setting = StepSetting.of(model, ids_BL, aligned, return_logits, with_state=cache is not None)
        return self._attempt(model.base, self._replay_step, model, setting, ids_BL, labels_BL, cache)

    def next_token(self, model: ImplicitModel, embedding_BLD: Tensor, cache: ConvergedStateCache) -> Token | None:
        is_single = embedding_BLD.shape[1] == 1 and cache.prefix is not None and cache.prefix.valid_BS is None
        is_evaluation = not model.training and not torch.is_grad_enabled()
        if not (is_single and is_evaluation and can_capture(model, embedding_BLD.device)):
            return None
        decoder = self.decoders.setdefault(cache, Decoder())
        decoder.tokens += 1
        return self._attempt(model, self._replay_token, decoder, model, embedding_BLD, cache)

    def training_solve(self, f: StackMap, embedding_BLD: Tensor, solver: SolverConfig) -> tuple[Tensor, list[Block]]:
        prefix, length = f.x.prefix, embedding_BLD.shape[1]
        # Without blocks, the empty state and a prefix need different graphs, which would replace each other.
        is_captured = prefix is None or (prefix.valid_BS is None and (solver.block_len or length) < length)
        has_defaults = f.valid_BL is None and not f.x.has_own_positions
        is_wanted = self.replays_training and f.model.training and has_defaults and is_captured
        if is_wanted and _can_solve_training(f.model, embedding_BLD):
            solved = self._attempt(f.model, self._solve, f.model, embedding_BLD, f.x.dropout_masks, prefix)
            if solved is not None:
                return solved
        return super().training_solve(f, embedding_BLD, solver)

    def evaluation_pass(
        self, f: StackMap, embedding_BLD: Tensor, solver: SolverConfig
    ) -> tuple[Tensor, Prefix, SolverStats]:
        x, length = f.x, embedding_BLD.shape[1]
        width = solver.eval_width(length)
        is_padded = x.valid_BL is not None or (x.prefix is not None and x.prefix.valid_BS is not None)
        is_replayed = not is_padded and not x.has_own_positions and length % width == 0
        pays = length >= MIN_TOKENS if width == 1 else length >= MIN_BLOCKS * width
        at_once = f.model.solve_at_once(x, width, Search.of(solver, is_training=False)) if pays else None
        if at_once is not None:
            z_BLD, prefix, blocks = at_once
            return z_BLD.to(embedding_BLD.dtype), prefix, gather_blocks(blocks, 1)
        if pays and is_replayed and can_capture(f.model, embedding_BLD.device):
            found = self._attempt(f.model, self._evaluate, f.model, embedding_BLD, x.prefix, width)
            if found is not None:
                return found
        return super().evaluation_pass(f, embedding_BLD, solver)

    def _attempt(self, model: ImplicitModel, replay: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return the result of `replay`; if a capture fails, log a warning and return None.

        After a failure the model gets a plain runner; with a reducer, only if a training step failed.
        """
        try:
            return replay(*args, **kwargs)
        except CaptureFailed as error:
            _log.warning("CUDA graphs cannot be captured here (%s): kernels are started one by one, slower", error)
            # With a reducer all ranks need the same runner, and only a training step fails on all of them together.
            if self.reducer is None or replay == self._replay_step:
                model.runner = Runner()
            return None

    def _can_step(self, model: ImplicitForCausalLM, ids_BL: Tensor, cache: ConvergedStateCache | None) -> bool:
        """Return whether to run this training step from a graph: graphs are wanted, and a graph can record the step.

        A head that must be called is excluded, because its hooks would not run at a replay. So is fp16, because its
        loss is scaled before the backward pass and the graph would not apply the scale.
        """
        base, solver = model.base, model.solver
        if not (self.replays_training and model.training and torch.is_grad_enabled()) or base.gradient_checkpointing:
            return False
        if model.calls_head:
            return False
        if autocast_dtype(ids_BL.device.type) == torch.float16:
            return False
        if cache is not None and base.has_growing_state:
            return False
        if solver is not None and solver.mode == "fixed_point":
            # In the backward pass of an implicit gradient, the number of products depends on the data.
            is_solved = cache is None or (solver.block_len or ids_BL.shape[1]) < ids_BL.shape[1]
            return solver.gradient != "implicit" and is_solved and _can_solve_training(base, ids_BL)
        return can_capture(base, ids_BL.device)

    def _replay_step(
        self,
        model: ImplicitForCausalLM,
        setting: StepSetting,
        ids_BL: Tensor,
        labels_BL: Tensor,
        cache: ConvergedStateCache | None,
    ) -> TrainingStep:
        """Run a training step from its graph, which is captured first if needed, and advance `cache`.

        With a reducer, the call is collective: if a capture fails on one rank, it raises CaptureFailed on all ranks.
        Raises: NonFiniteState, CaptureFailed.
        """
        is_new = self.step is None or self.step.setting != setting
        failure: CaptureFailed | None = None
        try:
            if is_new:
                self.step = self.token_graph = None  # to free their memory before the next capture
                self.step = StepGraph(setting, model, ids_BL)
            assert self.step is not None
            self.step.prepare(ids_BL, labels_BL, None if cache is None else cache.prefix, self._solve)
        except CaptureFailed as error:
            failure = error
        # All ranks must agree before the first replay, which waits for the gradients of all ranks.
        if is_new and self.reducer is not None and self.reducer.is_true_anywhere(failure is not None):
            failure = failure or CaptureFailed("another process cannot")
        if failure is not None:
            raise failure
        assert self.step is not None
        step = self.step.replay()
        if cache is not None:
            cache.prefix = self.step.states_after(cache.get_seq_length())
        return step

    def _replay_token(
        self, decoder: Decoder, model: ImplicitModel, embedding_B1D: Tensor, cache: ConvergedStateCache
    ) -> Token | None:
        """Run one token's pass from a graph and advance the cache; return None while tokens run without a graph.

        Raises: CaptureFailed, NonFiniteState.
        """
        assert cache.prefix is not None
        graph, setting, tokens = decoder.graph, BlockSetting.of(model, embedding_B1D), cache.prefix.length + 1
        if graph is None or not graph.holds(cache.prefix) or not graph.fits(setting, tokens):
            before = cache.prefix.without_room()
            graph = graph or self._free_token_graph()
            if graph is not None and graph.fits(setting, tokens):
                graph.restart(before)
                if decoder.graph is None:  # the graph served another cache, perhaps with other weights
                    graph.refresh_weights()
            elif decoder.tokens <= EAGER_TOKENS:
                return None
            else:
                self.token_graph = decoder.graph = graph = None  # to free its memory before the next capture
                room = before.length + ROOM_TOKENS if model.has_growing_state else None
                self.token_graph = graph = BlockGraph(setting, model, before, room=room)
            decoder.graph = graph
        graph.begin(embedding_B1D)
        stats = None if setting.solver is None else gather_blocks([Block(1, graph.solve())], 1)
        z_B1D = graph.close().clone()
        cache.prefix = graph.prefix()
        return z_B1D, stats

    def _free_token_graph(self) -> BlockGraph | None:
        """Return the newest graph for single tokens, or None if there is none or a cache uses it."""
        is_used = any(decoder.graph is self.token_graph for decoder in self.decoders.values())
        return None if is_used else self.token_graph

    @torch.no_grad()
    def _solve(
        self,
        model: ImplicitModel,
        embedding_BLD: Tensor,
        masks: tuple[Tensor, ...] | None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, list[Block]]:
        """Run the solver's part of a training pass from graphs. Raises: CaptureFailed, NonFiniteState."""
        solver, length = model.solver, embedding_BLD.shape[1]
        assert solver is not None
        width = min(solver.block_len or length, length)
        by_blocks = width < length
        first, has_masks = embedding_BLD[:, :width], masks is not None
        graph = self._graph_of(model, first, prefix, with_state=by_blocks, has_masks=has_masks, room_tokens=length)
        return _solve_blocks(graph, embedding_BLD, width, masks, closes=by_blocks)

    @torch.no_grad()
    def _evaluate(
        self, model: ImplicitModel, embedding_BLD: Tensor, prefix: Prefix | None, width: int
    ) -> tuple[Tensor, Prefix, SolverStats]:
        """Run an evaluation pass from graphs, in blocks of `width` tokens. Raises: CaptureFailed, NonFiniteState."""
        graph = self._graph_of(model, embedding_BLD[:, :width], prefix, room_tokens=embedding_BLD.shape[1])
        z_BLD, blocks = _solve_blocks(graph, embedding_BLD, width)
        return z_BLD, graph.prefix().without_room().map(Tensor.clone), gather_blocks(blocks, 1)

    def _graph_of(
        self,
        model: ImplicitModel,
        embedding_BWD: Tensor,
        prefix: Prefix | None,
        *,
        with_state: bool = True,
        has_masks: bool = False,
        room_tokens: int = 0,
    ) -> BlockGraph:
        """Return the graph for sequences after `prefix`, and capture it if the stored graph does not fit.

        room_tokens: the tokens of a sequence after the prefix. Raises: CaptureFailed.
        """
        setting = BlockSetting.of(model, embedding_BWD, with_state=with_state)
        kept = self.sequences.get(model.training)
        has_room = with_state and model.has_growing_state
        room = room_tokens + (0 if prefix is None else prefix.length) if has_room else None
        if kept is None or not kept.fits(setting, room or 0):
            self.sequences.pop(model.training, None)
            del kept  # to free its memory before the next capture
            before = prefix if prefix is not None or not with_state else empty_prefix(model, embedding_BWD)
            kept = BlockGraph(setting, model, before, room=room, has_masks=has_masks)
            self.sequences[model.training] = kept
        else:
            kept.restart(prefix)
        kept.refresh_weights()
        return kept


def _solve_blocks(
    graph: BlockGraph,
    embedding_BLD: Tensor,
    width: int,
    masks: tuple[Tensor, ...] | None = None,
    *,
    closes: bool = True,
) -> tuple[Tensor, list[Block]]:
    """Solve all blocks of `width` tokens; return z (B, L, D) and the length and statistics of each block.

    With `closes`, one f closes each block. Without it there must be one block, whose z is the solver's own, in a tensor
    that the next solve overwrites. Raises: NonFiniteState.
    """
    parts: list[Tensor] = []
    blocks: list[Block] = []
    for start in range(0, embedding_BLD.shape[1], width):
        here = slice(start, start + width)
        graph.begin(embedding_BLD[:, here], None if masks is None else tuple(mask[:, here] for mask in masks))
        blocks.append(Block(width, graph.solve()))
        parts.append(graph.close().clone() if closes else graph.best_BWD)
    return torch.cat(parts, dim=1) if closes else parts[0], blocks


def _can_solve_training(model: ImplicitModel, input_BL: Tensor) -> bool:
    """Return whether graphs can solve a training pass over ids (B, L) or embeddings.

    Blocks must be equally long, and the method must have a damping, because other methods may remember iterates.
    """
    assert model.solver is not None
    has_memory = Search.of(model.solver, is_training=True).damping is None
    length = input_BL.shape[1]
    width = model.solver.block_len or length
    return (width >= length or length % width == 0) and not has_memory and can_capture(model, input_BL.device)
