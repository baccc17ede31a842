"""Define the language models of all families: backbone, head, loss and generation.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import touched_module
from implicit_llm.models.pretrained import ImplicitPreTrainedModel
from implicit_llm.solver.stats import SolverStats
from implicit_llm_contracts.config.solver import EvalMode
from implicit_llm_data.shards import IGNORED_LABEL


@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """The output of a language model.

    loss: None without labels. logits (B, L, V): only those that `logits_to_keep` selects; None with
    `return_logits=False`. last_hidden_state (B, L, D): of all positions, before the head. solver_stats: None for an
    explicit model.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: ConvergedStateCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    solver_stats: SolverStats | None = None


class ImplicitForCausalLM(ImplicitPreTrainedModel, GenerationMixin):
    """A language model of any family: a backbone with head, loss and generation."""

    model_class: type[ImplicitModel]

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def base(self) -> ImplicitModel:
        return getattr(self, self.base_model_prefix)

    @property
    def calls_head(self) -> bool:
        """Whether the head must be called: it has another class, a bias, a hook or an adapter (`touched_module`)."""
        head: nn.Module = self.lm_head
        return type(head) is not nn.Linear or head.bias is not None or touched_module(head, {nn.Linear}) is not None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ConvergedStateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        aligned: bool = False,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        eval_mode: EvalMode | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool = True,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> ImplicitCausalLMOutput:
        """Return the logits and, with labels, the mean cross entropy (nats) in fp32, or fp64 if the model is fp64.

        Args: labels (B, L): -100 is ignored. aligned: whether logits at t are scored on the labels at t (word
            problems) or, as usual in Hugging Face, on those at t+1. logits_to_keep: how many of the last positions are
            computed (0: all), or an index of positions; labels must then have these positions. return_logits: False
            saves the memory of the logits, which are then None (see `total_loss`). num_items_in_batch: the divisor of
            the summed loss, by default the number of scored labels. All other arguments are those of the backbone.
        Raises: the errors of the backbone's `forward`.
        """
        self.refuse_unknown(kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            "eval_mode": eval_mode,
        }
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        has_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        is_bare = has_all and all(given is None or given is False for given in inputs.values())
        if labels is not None and input_ids is not None and is_bare:
            how = {"aligned": aligned, "return_logits": return_logits}
            cache = self.base.joined_cache(len(input_ids), past_key_values, None)
            step = self.base.runner.training_step(self, input_ids, labels, cache, **how)
            if step is not None:
                total, logits_BLV, hidden_BLD, stats = step
                mean = total / _count(labels, aligned, num_items_in_batch)
                return ImplicitCausalLMOutput(mean, logits_BLV, hidden_BLD, cache, solver_stats=stats)
        output = self.base(input_ids, past_key_values=past_key_values, return_dict=True, **inputs)
        kept_BLD, logits_BLV, loss = output.last_hidden_state[:, keep], None, None
        is_fp64 = kept_BLD.dtype == torch.float64  # the loss of transformers would cast it to fp32
        if labels is not None and (aligned or not return_logits or is_fp64):
            total, logits_BLV = self.total_loss(kept_BLD, labels, aligned, return_logits)
            loss = total / _count(labels, aligned, num_items_in_batch)
        elif return_logits:
            logits_BLV = self.lm_head(kept_BLD)
            if labels is not None:
                sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
                loss = self.loss_function(logits_BLV, labels, **sizes)
        states = output.past_key_values, output.hidden_states, output.solver_stats
        return ImplicitCausalLMOutput(loss, logits_BLV, output.last_hidden_state, *states)

    def total_loss(
        self, hidden_BLD: Tensor, labels_BL: Tensor, aligned: bool, return_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the cross entropy summed over the labels, in fp32 (fp64 for an fp64 model), and the logits (B, L, V).

        The label -100 is ignored; `aligned` is that of `forward`. Without `return_logits`, None replaces the logits,
        and only the `reference` kernels compute all logits at once, and models with `calls_head`.
        """
        if return_logits or self.calls_head:
            logits_BLV = self.lm_head(hidden_BLD)
            scored_BLV, labels_BL = (logits_BLV, labels_BL) if aligned else (logits_BLV[:, :-1], labels_BL[:, 1:])
            wide_TV = scored_BLV.flatten(0, 1)
            wide_TV = wide_TV.to(torch.promote_types(wide_TV.dtype, torch.float32))
            total = F.cross_entropy(wide_TV, labels_BL.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
            return total, logits_BLV if return_logits else None
        if not aligned:
            hidden_BLD, labels_BL = hidden_BLD[:, :-1], labels_BL[:, 1:]
        total = linear_cross_entropy(
            hidden_BLD.flatten(0, 1), self.lm_head.weight, labels_BL.flatten(), ignore_index=IGNORED_LABEL
        )
        return total, None

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward creates a ConvergedStateCache

    def generate(  # type: ignore[override]  # the other parameters are in kwargs
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Generate as in transformers, always in evaluation mode; restore each module's mode afterwards.

        Raises: ValueError for a cache_implementation, and for prompts with padding on the right.
        """
        if kwargs.get("cache_implementation") is not None:
            raise ValueError("cache_implementation: generation carries a cache of converged states; leave it out")
        asked = kwargs.get("use_cache"), getattr(generation_config, "use_cache", None), self.generation_config.use_cache
        wants_cache = next((use_cache for use_cache in asked if use_cache is not None), True)
        if wants_cache and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = ConvergedStateCache()
        in_training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            # The mixin types `self` as a protocol that no nn.Module meets.
            return super().generate(inputs, generation_config, **kwargs)  # type: ignore[misc]
        finally:
            for module in in_training:
                module.training = True

    def prepare_inputs_for_generation(
        self, input_ids: LongTensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare as in transformers, which generates from embeddings only if there is a parameter `inputs_embeds`.

        Raises: ValueError for a prompt that ends in padding, because transformers would generate after the padding.
        """
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        # A later turn starts with a filled cache; a chunk of a prompt comes without `next_sequence_length`.
        is_turn = bool(kwargs.get("is_first_iteration")) and "next_sequence_length" in kwargs
        is_prompt = is_turn or cache is None or cache.get_seq_length() == 0
        if mask is not None and is_prompt and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: a prompt ends in padding, and generation would continue from there; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        return super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]


def _count(labels_BL: Tensor, aligned: bool, num_items: int | Tensor | None) -> int | Tensor:
    """Return the divisor of the summed loss: `num_items`, or if it is None the number of scored labels."""
    if num_items is not None:
        return num_items
    return ((labels_BL if aligned else labels_BL[:, 1:]) != IGNORED_LABEL).sum()


class RecurrentForCausalLM(ImplicitForCausalLM):
    """A language model whose layers have states that do not grow with the sequence."""

    base_model_prefix = "backbone"
    _is_stateful = True  # so transformers refuses decoding methods that rewind
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012 (an instance variable in transformers)


# The fields that `sharing_weights` copies for every family. Our configurations have them, and so do those of the models
# of transformers that we convert, Mamba2 and Llama.
TAKEN = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "tie_word_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def sharing_weights(
    model: PreTrainedModel,
    cls: type[ImplicitForCausalLM],
    fixed: Mapping[str, Any],
    taken: Sequence[str],
    **fields: Any,
) -> ImplicitForCausalLM:
    """Return an explicit model of the class `cls` that shares its weights with `model`, a model of transformers.

    It starts in the mode of `model`, training or evaluation. The weights must have the same names in both classes. The
    configuration has the fields that TAKEN and `taken` name, copied from `model.config`, and the given `fields`.
    Raises: ModelConfigError if a setting has another value in `model.config` than in `fixed`, because the layers of
        `model` then differ from ours.
    """
    theirs = model.config
    for key, wanted in fixed.items():
        found = getattr(theirs, key)
        if (tuple(found) if isinstance(found, list) else found) != wanted:
            raise ModelConfigError(f"{key}: {found!r} is not supported, only {wanted!r}; use another checkpoint")
    fields |= {key: getattr(theirs, key) for key in (*TAKEN, *taken)}
    with torch.device("meta"):
        ours = cls(cls.config_class(is_implicit=False, dtype=model.dtype, **fields))
    ours.load_state_dict(model.state_dict(), assign=True)
    ours.tie_weights()
    ours.generation_config = model.generation_config
    return ours.train(model.training)


def sequential_forward(model: ImplicitForCausalLM, input_ids: Tensor, **kwargs: Any) -> ImplicitCausalLMOutput:
    """Run the model in sequential mode: solve one token after another, each from the converged state before it.

    An explicit model runs as usual. `kwargs` are those of `model(...)`.
    Raises: ValueError for an implicit model in train mode; the errors of `model(...)`.
    """
    return model(input_ids, eval_mode=None if model.solver is None else "sequential", **kwargs)
