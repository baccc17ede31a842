"""The loss that is made without logits against the one made of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from implicit_llm.models.configuration import ImplicitLlama3Config, ImplicitMamba2Config

SMALL = [
    ImplicitMamba2Config(vocab_size=37, hidden_size=16, num_hidden_layers=1, head_dim=8, state_size=8),
    ImplicitLlama3Config(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        is_implicit=False,
    ),
]


@pytest.mark.parametrize("config", SMALL, ids=["mamba2-implicit", "llama3-explicit"])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_loss_and_gradients_equal_those_of_the_logits(config, is_aligned: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    ids, labels = torch.randint(37, (2, 9)), torch.randint(37, (2, 9))
    labels[:, 3] = -100
    gradients = []
    for return_logits in (True, False):
        out = model(input_ids=ids, labels=labels, aligned=is_aligned, return_logits=return_logits)
        assert (out.logits is None) == (not return_logits)
        gradients.append((out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))))
    for by_logits, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(
            fused, by_logits, rtol=1e-4, atol=1e-6, check_dtype=False
        )  # the loss by logits is made in fp32


def test_num_items_in_batch_divides_the_sum() -> None:
    model = AutoModelForCausalLM.from_config(SMALL[1]).train()
    ids = torch.randint(37, (2, 9))
    options = {"labels": ids, "aligned": True}
    loss = model(input_ids=ids, return_logits=False, num_items_in_batch=1, **options).loss
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum"))
