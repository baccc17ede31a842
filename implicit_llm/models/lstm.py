"""Define a plain LSTM as a causal language model of Hugging Face: the recurrent baseline of the word problems.

Shapes: `B` batch, `L` length, `D` model, `K` layers, `V` vocabulary.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.stack import Prefix

LONGEST = 32768  # tokens per cuDNN call; cuDNN fails at 65,536


@strict
class LstmConfig(PreTrainedConfig):
    """The configuration of an LSTM with `num_hidden_layers` layers of width `hidden_size`."""

    model_type = "lstm"

    vocab_size: int = 240
    hidden_size: int = 512
    num_hidden_layers: int = 1
    tie_word_embeddings: bool = False


class LstmForCausalLM(PreTrainedModel):
    """An LSTM between an embedding and an untied head, with PyTorch's default initialisation."""

    config_class = LstmConfig
    config: LstmConfig

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, config.num_hidden_layers, batch_first=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: ConvergedStateCache | None = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """Return the logits (B, L, V) after each token.

        past_key_values: a cache of the states (h, c) from which the sequences start; the call advances the cache in
            place, without a gradient.
        Raises: TypeError for an argument that this model does not support, such as labels; ValueError for padding.
        """
        for name, value in others.items():
            if value is not None and (name, value) != ("use_cache", False):
                raise TypeError(f"LstmForCausalLM takes no argument {name!r}; leave it out")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: an LSTM would read padding as tokens; give it sequences of one length")
        cache = past_key_values
        before: Any = None
        if cache is not None and cache.prefix is not None:
            h_KBD, c_KBD = map(torch.stack, zip(*cache.prefix.layers, strict=True))
            before = h_KBD, c_KBD
        pieces = []
        for tokens_BL in input_ids.split(LONGEST, dim=1):
            hidden_BLD, (h_KBD, c_KBD) = self.lstm(self.embedding(tokens_BL), before)
            before = h_KBD, c_KBD
            pieces.append(hidden_BLD)
        hidden_BLD = torch.cat(pieces, dim=1)
        if cache is not None:
            layers = tuple(zip(h_KBD.detach(), c_KBD.detach(), strict=True))
            cache.prefix = Prefix(layers, cache.get_seq_length() + input_ids.shape[1])
        return CausalLMOutput(logits=self.head(hidden_BLD))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.LSTM | nn.Linear):
            module.reset_parameters()
