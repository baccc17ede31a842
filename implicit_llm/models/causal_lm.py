"""Language models of both families: backbone, tied head, loss, generation.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from implicit_llm.kernels.linear_cross_entropy import linear_cross_entropy
from implicit_llm.models.backbone import (
    ImplicitLlama3Model,
    ImplicitMamba2Model,
    ImplicitModel,
    ImplicitPreTrainedModel,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.configuration import ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.solver.stats import SolverStats

IGNORED_LABEL = -100


@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """loss is None without labels; logits (B, L, V), None if not asked for; solver_stats is None if explicit.

    last_hidden_state (B, L, D): what the head is applied to.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: ConvergedStateCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    solver_stats: SolverStats | None = None


class ImplicitForCausalLM(ImplicitPreTrainedModel, GenerationMixin):
    """What both families share around the backbone."""

    @property
    def base(self) -> ImplicitModel:
        return getattr(self, self.base_model_prefix)

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ConvergedStateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        labels_aligned: bool = False,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_positions: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool = True,
        cache_params: ConvergedStateCache | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ImplicitCausalLMOutput | tuple[Any, ...]:
        """Logits and, with labels, the mean cross entropy in fp32.

        Args: labels (B, L), -100 ignored. labels_aligned: logits at t are scored on labels at t (word problems);
            otherwise on labels at t+1, as everywhere in Hugging Face. logits_to_keep: only the last so many positions
            (0: all), or an index of positions. return_logits=False: the loss alone, without ever holding all logits;
            num_items_in_batch divides its sum instead of the number of labels. Others as in the backbone.
        """
        output = self.base(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_positions=output_positions,
            cache_params=cache_params,
        )
        hidden_BLD = output.last_hidden_state
        logits_BLV = loss = None
        if return_logits:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits_BLV = self.lm_head(hidden_BLD[:, keep])
        if labels is not None and logits_BLV is None:
            loss = self._fused_loss(hidden_BLD, labels, labels_aligned, kwargs.get("num_items_in_batch"))
        elif labels is not None and logits_BLV is not None and labels_aligned:
            loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL)
        elif labels is not None:
            loss = self.loss_function(logits=logits_BLV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = ImplicitCausalLMOutput(
            loss, logits_BLV, hidden_BLD, output.past_key_values, output.hidden_states, output.solver_stats
        )
        return result if return_dict is not False else result.to_tuple()

    def _fused_loss(
        self, hidden_BLD: Tensor, labels_BL: Tensor, is_aligned: bool, num_items: int | Tensor | None
    ) -> Tensor:
        if not is_aligned:
            hidden_BLD, labels_BL = hidden_BLD[:, :-1], labels_BL[:, 1:]
        total = linear_cross_entropy(
            hidden_BLD.flatten(0, 1), self.lm_head.weight, labels_BL.flatten(), ignore_index=IGNORED_LABEL
        )
        return total / ((labels_BL != IGNORED_LABEL).sum() if num_items is None else num_items)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes a ConvergedStateCache

    def prepare_inputs_for_generation(self, input_ids: LongTensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache"):
            kwargs["past_key_values"] = ConvergedStateCache()
        # The mixin types `self` as a protocol that no nn.Module meets.
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]


class ImplicitMamba2ForCausalLM(ImplicitForCausalLM):
    """Mamba2 language model, explicit or implicit."""

    config_class = ImplicitMamba2Config
    config: ImplicitMamba2Config
    base_model_prefix = "backbone"
    _no_split_modules = ["Mamba2Layer"]  # noqa: RUF012 (an instance variable in transformers)
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012 (an instance variable in transformers)

    def __init__(self, config: ImplicitMamba2Config) -> None:
        super().__init__(config)
        self.backbone = ImplicitMamba2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class ImplicitLlama3ForCausalLM(ImplicitForCausalLM):
    """Llama language model, explicit or implicit."""

    config_class = ImplicitLlama3Config
    config: ImplicitLlama3Config
    base_model_prefix = "model"
    _no_split_modules = ["Llama3Layer"]  # noqa: RUF012 (an instance variable in transformers)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (an instance variable in transformers)

    def __init__(self, config: ImplicitLlama3Config) -> None:
        super().__init__(config)
        self.model = ImplicitLlama3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
