"""Decoding on a GPU: one token for every sequence of a batch, its iterations replayed as CUDA graphs.

A token takes thousands of small kernels, and launching them takes ten times as long as running them. So the work on a
token is captured once, in three graphs over tensors that stay where they are: `begin` (injection), `iterate` (f, the
update, and which sequences are done), `close` (the last f, whose states replace the old ones); for an explicit model in
one. The host asks only every few iterations whether all sequences are done; those that are keep their fixed point.

Shapes: `B` batch, `D` model, `S` room for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_llm.models.stack import Prefix, StackInput
from implicit_llm.solver.best import Best
from implicit_llm.solver.config import SolverConfig
from implicit_llm.solver.methods import Damped
from implicit_llm.solver.residual import make_rule
from implicit_llm.solver.stats import BlockStats, SolverStats, gather_blocks

if TYPE_CHECKING:
    from implicit_llm.models.backbone import ImplicitModel

CHECK_EVERY = 2  # replays between two questions whether all are done
ROOM_TOKENS = 256  # by which the room for keys and values grows; then the graphs are captured again
_WARM_UPS = 2  # eager runs before the capture, in which kernels compile and allocators settle


@dataclass(frozen=True)
class Setting:
    """What a captured graph was made for; another one needs another graph."""

    batch: int
    solver: SolverConfig | None
    dtype: torch.dtype
    autocast: torch.dtype | None
    weights: tuple[int, ...]  # versions of the parameters: a training step makes the graphs stale


def setting_of(model: ImplicitModel, embedding_B1D: Tensor) -> Setting:
    device = embedding_B1D.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    versions = tuple(0 if parameter.is_inference() else parameter._version for parameter in model.parameters())
    return Setting(len(embedding_B1D), model.solver, embedding_B1D.dtype, autocast, versions)


def can_replay(model: ImplicitModel, embedding_BLD: Tensor) -> bool:
    """Whether single tokens of this kind can come from graphs: on a GPU, in evaluation, without Anderson's memory."""
    if embedding_BLD.device.type != "cuda" or torch.is_grad_enabled() or model.training:
        return False
    solver = model.solver
    has_memory = solver is not None and solver.method == "anderson"
    return not has_memory and not torch.cuda.is_current_stream_capturing()


class TokenGraph:
    """The graphs of one model, batch size and solver, with the states they carry."""

    def __init__(
        self, model: ImplicitModel, embedding_B1D: Tensor, prefix: Prefix, room_tokens: int = ROOM_TOKENS
    ) -> None:
        self.setting = setting_of(model, embedding_B1D)
        self._model = model
        self._embedding = embedding_B1D.clone()
        self._position = torch.tensor([prefix.length], device=embedding_B1D.device)
        self._room = prefix.length + room_tokens if model.has_growing_state else None
        self.length = prefix.length
        self._layers = tuple(tuple(self._with_room(t) for t in layer) for layer in prefix.layers)
        template = model.stack_input(self._embedding, None, self._position[None], None)
        self._weights = template.weights  # normalised and cast once for all tokens
        self._x: StackInput = template
        self._out = torch.zeros_like(self._embedding)
        self._z = torch.zeros_like(self._embedding)
        solver = self.setting.solver
        if solver is not None:
            self._best = Best(self._z, None)
            self._rule = make_rule(solver.eval_stop, solver.tol, is_training=False)
            self._update = Damped(solver.tau)
        self._active = torch.arange(self.setting.batch, device=self._z.device)
        self._pool: Any = None
        self._graphs = {part.__name__: self._capture(part) for part in self._parts()}

    def fits(self, model: ImplicitModel, embedding_B1D: Tensor, prefix: Prefix) -> bool:
        """Whether it holds the states of `prefix`, has room for a token, and was captured for what is asked now."""
        is_same = prefix.layers is self._layers and prefix.length == self.length
        has_room = self._room is None or self.length < self._room
        return is_same and has_room and self.setting == setting_of(model, embedding_B1D)

    @torch.no_grad()
    def step(self, embedding_B1D: Tensor) -> tuple[Tensor, Prefix, SolverStats | None]:
        """z* of the next token (B, 1, D), the prefix that now ends with it, and the statistics.

        The prefix shares its tensors with this object: the next step overwrites them.
        """
        self._embedding.copy_(embedding_B1D)
        solver, stats = self.setting.solver, None
        if solver is None:
            self._graphs["_explicit"].replay()
        else:
            self._graphs["_begin"].replay()
            stats = self._iterate_until_done(solver)
            self._graphs["_close"].replay()
        self.length += 1
        return self._out.clone(), self.prefix(), stats

    def prefix(self) -> Prefix:
        return Prefix(self._layers, self.length, room=self._room)

    def _iterate_until_done(self, solver: SolverConfig) -> SolverStats:
        max_iter = max(1, solver.eval_budget - 1)
        for iteration in range(1, max_iter + 1):
            self._graphs["_iterate"].replay()
            if iteration % CHECK_EVERY == 0 and bool(self._best.done.all()):
                break
        self._best.raise_if_not_finite()
        best = self._best
        is_open_B1 = best.residual_BL >= solver.tol
        block = BlockStats(best.num_iter.clone(), best.residual.clone(), best.done.clone(), is_open_B1)
        return gather_blocks([(1, block)], 1, positions=False)

    def _parts(self) -> tuple[Callable[[], None], ...]:
        return (self._explicit,) if self.setting.solver is None else (self._begin, self._iterate, self._close)

    def _explicit(self) -> None:
        self._begin()
        self._close()

    def _begin(self) -> None:
        model = self._model
        injection = model.injection(self._embedding) if self.setting.solver is not None else None
        rope = model.rope(self._position[None])
        prefix = Prefix(self._layers, self.length, room=self._room, position=self._position)
        self._x = replace(self._x, weights=self._weights, injection_BLE=injection, rope=rope, prefix=prefix)
        if self.setting.solver is not None:
            self._z.zero_()
            self._best.reset()

    def _iterate(self) -> None:
        fz = self._model.apply_stack(self._z, self._x)[0]
        z_next = self._update(self._z, fz)
        self._best.take(self._active, (self._z, fz, z_next), self._rule, None)
        self._z.copy_(z_next)

    def _close(self) -> None:
        z = self._embedding if self.setting.solver is None else self._best.z
        out, layers = self._model.apply_stack(z, self._x, return_states=True)
        self._out.copy_(out)
        for mine, new in zip(self._layers, layers, strict=True):
            for old_state, state in zip(mine, new, strict=True):
                if state is not old_state:  # keys and values were written in place
                    old_state.copy_(state)
        self._position += 1

    def _capture(self, part: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run eagerly until kernels are compiled, put the states back, then record."""
        autocast = self.setting.autocast
        kept = [t.clone() for layer in self._layers for t in layer]
        position = self._position.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with (
            torch.no_grad(),
            torch.autocast("cuda", dtype=autocast, enabled=autocast is not None, cache_enabled=False),
        ):
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    part()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                part()
        self._pool = graph.pool()
        for mine, old in zip((t for layer in self._layers for t in layer), kept, strict=True):
            mine.copy_(old)
        self._position.copy_(position)
        return graph

    def _with_room(self, state: Tensor) -> Tensor:
        """A copy of a state; of keys and values (B, H, S, P) one with room for the tokens to come."""
        if self._room is None:
            return state.clone()
        batch, heads, _, width = state.shape
        roomy = state.new_zeros(batch, heads, self._room, width)
        roomy[:, :, : state.shape[2]] = state
        return roomy


@torch.no_grad()
def replay_sequence(
    model: ImplicitModel, embedding_BLD: Tensor, prefix: Prefix
) -> tuple[Tensor, Prefix, list[SolverStats]]:
    """Tokens one after another, each to its fixed point: z* (B, L, D), the prefix that ends with them, statistics."""
    graph = TokenGraph(model, embedding_BLD[:, :1], prefix, room_tokens=embedding_BLD.shape[1])
    outputs, statistics = [], []
    for token in embedding_BLD.split(1, dim=1):
        z_B1D, _, stats = graph.step(token)
        outputs.append(z_B1D)
        assert stats is not None
        statistics.append(stats)
    return torch.cat(outputs, dim=1), graph.prefix().without_room(), statistics
