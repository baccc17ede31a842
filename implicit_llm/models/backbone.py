"""Define models without their heads: embedding, injection, and a layer stack, which implicit models iterate.

Shapes: `B` batch, `L` length, `D` model, `E` width of the injection, `V` vocabulary.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers.utils import ModelOutput, can_return_tuple

from implicit_llm.kernels.selection import is_reference
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import PACKED, ModelConfigError
from implicit_llm.models.layers import Injection, Layer, RMSNorm, added, touched_module
from implicit_llm.models.pretrained import ImplicitPreTrainedModel
from implicit_llm.models.runner import Runner
from implicit_llm.models.stack import SHARED_BY, LayerState, Padding, Prefix, StackInput, refuse_lost_gradient
from implicit_llm.solver.passes import Search, differentiated_steps, free_stats, unrolled_pass, with_gradient
from implicit_llm.solver.stats import Block, SolverStats
from implicit_llm_contracts.config.solver import AS_TRAINED, EvalMode, SolverConfig

_log = logging.getLogger(__name__)


@dataclass
class ImplicitModelOutput(ModelOutput):
    """The output of a model without its head.

    last_hidden_state (B, L, D): for an implicit model the final z, which approximates the fixed point z*.
    hidden_states: the input of each layer and then the output, if requested. solver_stats: None for an explicit model.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: ConvergedStateCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    solver_stats: SolverStats | None = None


class StackMap:
    """The map f(., x) of a model for one input x; the solver iterates it as a `SequenceMap` of solver.passes."""

    def __init__(self, model: "ImplicitModel", x: StackInput) -> None:
        self.model, self.x = model, x

    @property
    def valid_BL(self) -> Tensor | None:
        return self.x.valid_BL

    def __call__(self, z_BLD: Tensor) -> Tensor:
        return self.evaluate(z_BLD)[0]

    def evaluate(self, z_BLD: Tensor, *, return_states: bool = False) -> tuple[Tensor, tuple[LayerState, ...]]:
        """Return f(z) and the layers' states after the block (empty without `return_states`).

        With activation checkpointing in training, the backward pass evaluates f again. Raises: LostGradient.
        """
        evaluate = partial(self.model.apply_stack, x=self.x, return_states=return_states)
        if not (self.model.gradient_checkpointing and torch.is_grad_enabled() and self.model.training):
            return evaluate(z_BLD)
        fz_BLD, states = self.model._gradient_checkpointing_func(evaluate, z_BLD)
        refuse_lost_gradient(fz_BLD, self.model, self.x)
        return fz_BLD, states

    def select(self, index_B: Tensor) -> "StackMap":
        return StackMap(self.model, self.x.select(index_B))

    def is_wanted(self, num_open: int) -> bool:
        """Return whether `num_open` > 0 on any process; collective if layers are sharded.

        All processes must then evaluate f together, because f gathers the weights.
        """
        if self.x.mesh is None:
            return num_open > 0
        most = torch.tensor(num_open, device=self.x.mesh.device_type)
        for group in self.x.mesh.get_all_groups():
            distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
        return bool(most)

    def block(self, start: int, end: int, state: Prefix | None) -> "StackMap":
        return StackMap(self.model, self.x.block(start, end, state))

    def close(self, z_BLD: Tensor) -> tuple[Tensor, Prefix]:
        out_BLD, layers = self.model.apply_stack(z_BLD, self.x, return_states=True)
        return out_BLD, self.x.extend_prefix(layers, z_BLD.shape[1])


class ImplicitModel(ImplicitPreTrainedModel):
    """A model without its head; each family has a subclass with its layer class and names of embedding and final norm.

    runner: the object that runs the passes, initially a `runner_class()`.
    """

    layer_class: type[Layer]
    _final_norm: str
    runner_class: type[Runner] = Runner
    _has_said_so = False
    has_growing_state = False  # whether a layer's state grows with the sequence

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.norm_eps
        setattr(self, self._input_embed_layer, nn.Embedding(config.vocab_size, width))
        setattr(self, self._final_norm, RMSNorm(width, eps))
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        if config.is_implicit:
            if config.injection_width == 1:  # PyTorch would silently broadcast width 1 to every channel
                raise ModelConfigError(
                    f"injection_width: 1 would be added to every channel alike; let {type(config).__name__} return the "
                    "width of what it is added to"
                )
            self.injection = Injection(width, config.injection_width, eps, config.has_weight_norm)
        self.gradient_checkpointing = False
        self.runner = self.runner_class()
        self.post_init()

    def rope(self, position_ids_BL: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines (1 or B, L, half a head's width) of attention layers; None for other layers."""
        return None

    def apply_stack(
        self, h_BLD: Tensor, x: StackInput, *, return_states: bool = False, collect: list[Tensor] | None = None
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """Evaluate f once: apply all layers and the final norm; append each layer's input and then f(h) to `collect`.

        Returns: f(h), and a tuple of the layers' states after the block, which is empty without `return_states`.
        Raises: LostGradient; see `stack.refuse_lost_gradient`.
        """
        states, branch_BLD, rest = [], None, x
        for index, layer in enumerate(self.layers):
            if collect is not None:
                collect.append(added(h_BLD, branch_BLD))
            if index % SHARED_BY == 0:
                *inputs, rest = rest.shared(min(SHARED_BY, len(self.layers) - index))
            h_BLD, branch_BLD, state = layer(h_BLD, branch_BLD, inputs[index % SHARED_BY], index, return_states)
            refuse_lost_gradient(branch_BLD, layer, x)
            states.append(state)
        _, h_BLD = getattr(self, self._final_norm).of_sum(h_BLD, branch_BLD)
        if collect is not None:
            collect.append(h_BLD)
        return h_BLD, tuple(states) if return_states else ()

    def solve_at_once(self, x: StackInput, width: int, search: Search) -> tuple[Tensor, Prefix, list[Block]] | None:
        """Solve all blocks of `width` tokens in one kernel, and close each with one undamped evaluation of f.

        Return z (B, L, D) in fp32, the state after the last block, and each block's statistics.
        Return None instead if no kernel can do this, as always here, or if a token became NaN or infinite; the caller
        then solves the blocks one after another.
        """
        return None

    def token_stack(self, weights: tuple[Any, ...]) -> Callable[[Tensor, StackInput], Tensor] | None:
        """Return a function that evaluates f(z, x) faster on one token of one sequence; None if there is none, as here.

        The function is for implicit models in fp32 without autocast, gradient, dropout or padding. Its StackInput must
        have a prefix. For attention layers, the prefix must have room for the token; the function writes the token's
        key and value at `Prefix.position`.
        weights: the layers' weights, as in the StackInput.
        """
        return None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ConvergedStateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        eval_mode: EvalMode | None = None,
        **kwargs: Any,
    ) -> ImplicitModelOutput:
        """Run the training pass of `solver`, or its evaluation pass if the model is in evaluation mode.

        An explicit model runs its layers once in either mode.

        Args: input_ids (B, L) or inputs_embeds (B, L, D). attention_mask (B, past + L): 0 for padding, which may be
            anywhere in a sequence and never changes the results of the tokens. position_ids: see `stack_input`; a pass
            with others than the default runs without CUDA graphs. past_key_values: a cache of converged states, which
            is advanced in place and passes no gradient. use_cache: whether to create a cache if none is given.
            output_hidden_states: only for explicit models. eval_mode: replaces the solver's `eval_mode` for this call.
        Raises: ValueError for arguments that contradict each other or have a wrong shape, and for packed documents;
            ConfigError for an unknown `eval_mode`; TypeError for unknown arguments; NonFiniteState, whose message has
            the position within a block, not counting padding; LostGradient; NotImplementedError if an implicit model is
            exported or traced.
        """
        self.refuse_unknown(kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        h_BLD = self._embedded(input_ids, inputs_embeds, bool(output_hidden_states))
        cache = self.joined_cache(len(h_BLD), past_key_values, use_cache)
        padding = Padding.of(attention_mask, h_BLD, 0 if cache is None else cache.get_seq_length())
        is_plain = not output_hidden_states and eval_mode is None
        position_ids = self._own_positions(position_ids, h_BLD, cache, padding is not None)
        if cache is not None and is_plain and padding is None and position_ids is None:
            token = self.runner.next_token(self, h_BLD, cache)
            if token is not None:
                return ImplicitModelOutput(token[0], cache, None, token[1])
        solver = self._solver_of_call(eval_mode)
        if solver is not None and (torch.compiler.is_exporting() or torch.jit.is_tracing()):
            raise NotImplementedError(
                "torch.export and torch.jit.trace would fix the number of iterations of an implicit model, which "
                "depends on its input; run the model itself, or export an explicit one"
            )
        prefix = None if cache is None or cache.prefix is None else cache.prefix.without_room()
        if padding is not None:
            h_BLD = padding.move_behind(h_BLD)
            if position_ids is not None:
                position_ids = padding.move_behind(position_ids.expand(len(h_BLD), -1))
        x = self.stack_input(h_BLD, None if padding is None else padding.valid_BL, position_ids, prefix)
        collect: list[Tensor] | None = [] if output_hidden_states else None
        stats: SolverStats | None = None
        if solver is None:
            h_BLD, prefix = self._explicit_pass(h_BLD, x, cache is not None, collect)
        else:
            h_BLD, prefix, stats = self._implicit_pass(h_BLD, x, solver, cache is not None)
        if cache is not None:
            if prefix is None:
                raise ValueError(
                    "a pass as in training neither reads nor fills a cache of converged states in evaluation mode: "
                    "take another eval_mode than 'as_trained', or pass use_cache=False"
                )
            cache.prefix = prefix if padding is None else padding.move_back_keys(prefix)
        if padding is not None:
            h_BLD = padding.move_back(h_BLD)
            collect = None if collect is None else [padding.move_back(state_BLD) for state_BLD in collect]
            if stats is not None and stats.unconverged_BL is not None:
                stats = replace(stats, unconverged_BL=padding.move_back(stats.unconverged_BL))
        return ImplicitModelOutput(h_BLD, cache, tuple(collect) if collect is not None else None, stats)

    def joined_cache(self, batch: int, cache: object, use_cache: bool | None) -> ConvergedStateCache | None:
        """Return the cache that a forward pass advances: the given one, a new one if `use_cache` is true, or None.

        Raises: ValueError for a cache of another class, another model or another number of sequences.
        """
        if cache is None and not use_cache:
            return None
        cache = ConvergedStateCache() if cache is None else cache
        if not isinstance(cache, ConvergedStateCache):
            raise ValueError(
                f"past_key_values: a {type(cache).__name__} holds no converged states; call the model with "
                "use_cache=True and give back the past_key_values that it returns"
            )
        config = self.config
        cache.join(
            f"{config.model_type} of {config.num_hidden_layers} layers and width {config.hidden_size}",
            batch,
            is_growing=self.has_growing_state,
        )
        return cache

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, with_hidden_states: bool) -> Tensor:
        """Return the embedding (B, L, D). Raises: ValueError if these arguments of `forward` are wrong."""
        is_ids = inputs_embeds is None
        given = input_ids if is_ids else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        if with_hidden_states and self.config.is_implicit:
            raise ValueError(
                "an implicit model has no hidden state per layer, only its fixed point: read last_hidden_state"
            )
        if given.ndim != (2 if is_ids else 3) or 0 in given.shape:
            wanted = "input_ids must be (batch, length)" if is_ids else "inputs_embeds must be (batch, length, width)"
            raise ValueError(f"{wanted} with at least one token; got shape {tuple(given.shape)}")
        return self.get_input_embeddings()(given) if is_ids else given

    def _solver_of_call(self, eval_mode: EvalMode | None) -> SolverConfig | None:
        """Return the solver settings of this call, with `eval_mode` if it is given; None for an explicit model.

        Raises: ValueError if `eval_mode` is given in train mode or without solver; ConfigError for an unknown mode.
        """
        solver = self.solver
        if eval_mode is None:
            return solver
        if solver is None or self.training:
            raise ValueError("eval_mode is for implicit models in evaluation mode; drop it or call model.eval() first")
        return replace(solver, eval_mode=eval_mode)

    def calls_modules(self) -> bool:
        """Return whether a module must be called (`touched_module`), which rules out CUDA graphs; log it once."""
        touched = touched_module(self)
        if touched is not None and not self._has_said_so:
            self._has_said_so = True
            name = next(name for name, module in self.named_modules() if module is touched)
            _log.warning(
                "%s has a hook, an adapter, or a quantised or sharded weight: the model now calls each module, without "
                "fused products and CUDA graphs, which is slower",
                name or "the model",
            )
        return touched is not None

    def stack_input(
        self,
        embedding_BLD: Tensor,
        valid_BL: Tensor | None,
        position_ids: Tensor | None,
        prefix: Prefix | None,
    ) -> StackInput:
        """Return everything that f needs besides z; call this once per forward pass.

        Args: valid_BL: False for padding, which comes last in each sequence. position_ids (1 or B, L): by default they
            count all tokens before a token, but not padding.
        Raises: ValueError for positions that do not increase, as in packed documents.
        """
        has_own_positions = position_ids is not None
        if position_ids is None:
            position_ids = _default_positions(embedding_BLD, prefix)
        elif embedding_BLD.shape[1] > 1:
            goes_on = position_ids[:, 1:] > position_ids[:, :-1]
            if not bool((goes_on if valid_BL is None else goes_on | ~valid_BL[:, 1:]).all()):
                raise ValueError(f"position_ids must increase along a row: {PACKED}")
        layers = cast("Iterable[Layer]", self.layers)
        weights, mesh = tuple(layer.weights() for layer in layers), None
        if any(of_layer is None for of_layer in weights) and self.calls_modules():
            mesh = next((p.device_mesh for p in self.layers.parameters() if hasattr(p, "device_mesh")), None)
        return StackInput(
            weights=weights,
            injection_BLE=self.injection(embedding_BLD) if self.config.is_implicit else None,
            valid_BL=valid_BL,
            dropout_masks=self.draw_dropout(embedding_BLD),
            rope=self.rope(position_ids),
            prefix=prefix,
            mesh=mesh,
            has_own_positions=has_own_positions,
        )

    def _own_positions(
        self, position_ids: Tensor | None, embedding_BLD: Tensor, cache: ConvergedStateCache | None, is_padded: bool
    ) -> Tensor | None:
        """Return `position_ids`, or None if they are the default, which is only found out without padding.

        Raises: ValueError for a wrong shape.
        """
        batch, length, _ = embedding_BLD.shape
        if position_ids is None or (length == 1 and not self.has_growing_state):
            return None
        if position_ids.shape not in ((1, length), (batch, length)):
            raise ValueError(
                f"position_ids must have the shape (1, {length}) or (batch, length) = {(batch, length)}; got "
                f"{tuple(position_ids.shape)}"
            )
        default = None if is_padded else _default_positions(embedding_BLD, None if cache is None else cache.prefix)
        return None if default is not None and bool((position_ids == default).all()) else position_ids

    def draw_dropout(self, embedding_BLD: Tensor) -> tuple[Tensor, ...] | None:
        """Return a scaled keep-mask (B, L, D) for each layer, or None without dropout or outside training."""
        if not self.training or self.config.dropout == 0:
            return None
        keep = 1 - self.config.dropout
        return tuple(torch.empty_like(embedding_BLD).bernoulli_(keep).div_(keep) for _ in self.layers)

    def _explicit_pass(
        self, h_BLD: Tensor, x: StackInput, with_state: bool, collect: list[Tensor] | None
    ) -> tuple[Tensor, Prefix | None]:
        if collect is None:
            out_BLD, layers = StackMap(self, x).evaluate(h_BLD, return_states=with_state)
        else:
            out_BLD, layers = self.apply_stack(h_BLD, x, return_states=with_state, collect=collect)
        prefix = x.extend_prefix(layers, h_BLD.shape[1]).map(Tensor.detach) if with_state else None
        return out_BLD, prefix

    def _implicit_pass(
        self, embedding_BLD: Tensor, x: StackInput, solver: SolverConfig, with_state: bool
    ) -> tuple[Tensor, Prefix | None, SolverStats]:
        f = StackMap(self, x)
        if not self.training and solver.eval_mode != AS_TRAINED:
            with torch.no_grad():
                z_BLD, prefix, stats = self.runner.evaluation_pass(f, embedding_BLD, solver)
            if torch.is_grad_enabled() and (
                is_reference() or embedding_BLD.requires_grad or any(w.requires_grad for w in self.parameters())
            ):
                z_BLD = with_gradient(f, z_BLD, solver)
            return z_BLD, prefix, stats
        if solver.mode == "unrolled":
            z_BLD, stats = unrolled_pass(f, torch.zeros_like(embedding_BLD), solver)
        else:
            with torch.no_grad():
                z_BLD, blocks = self.runner.training_solve(f, embedding_BLD, solver)
            z_BLD = differentiated_steps(f, z_BLD, solver)
            stats = free_stats(blocks, solver)
        if not (with_state and self.training):
            return z_BLD, None, stats
        stats.num_closing += 1  # f is evaluated once more for the state
        with torch.no_grad():
            return z_BLD, f.close(z_BLD)[1], stats


class RecurrentModel(ImplicitModel):
    """An explicit or implicit model whose layers have states that do not grow with the sequence."""

    base_model_prefix = "backbone"
    _input_embed_layer = "embeddings"
    _final_norm = "norm_f"


def _default_positions(embedding_BLD: Tensor, prefix: Prefix | None) -> Tensor:
    """Return the default position (1 or B, L) of each token: the number of tokens before it, including the prefix.

    Padding in the prefix does not count; padding among these tokens must come last.
    """
    positions_1L = torch.arange(embedding_BLD.shape[1], device=embedding_BLD.device)[None]
    if prefix is None:
        return positions_1L
    return positions_1L + (prefix.length if prefix.valid_BS is None else prefix.valid_BS.sum(1, keepdim=True))
