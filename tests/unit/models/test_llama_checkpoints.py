"""Llama checkpoints of transformers become explicit models of ours with the same logits, and then implicit ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from implicit_llm import SolverConfig, from_llama, sequential_forward, to_implicit
from implicit_llm.models.configuration import ImplicitLlama3Config
from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.config import flops

SMALL = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GROUPED = {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "grouped": GROUPED,
    "one key": {"num_key_value_heads": 1},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0, **GROUPED},
}
INPUT_IDS = torch.randint(3, 37, (2, 40), generator=torch.Generator().manual_seed(0))


def _llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.3, **fields)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_llama_gives_the_logits_and_tokens_that_it_gives_in_transformers(kind: str, tmp_path: Path) -> None:
    _llama(**KINDS[kind]).save_pretrained(tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ours = from_llama(theirs)
    expected = theirs(INPUT_IDS).logits
    torch.testing.assert_close(ours(INPUT_IDS).logits, expected, atol=1e-4, rtol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 6, "attention_mask": torch.ones_like(INPUT_IDS), "pad_token_id": 0}
    assert torch.equal(ours.generate(INPUT_IDS, **options), theirs.generate(INPUT_IDS, **options))
    assert ours.model.embed_tokens.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    ours.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(INPUT_IDS).logits, ours(INPUT_IDS).logits)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: 'dynamic'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ],
)
def test_what_the_block_does_not_have_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        from_llama(_llama(**fields))
    assert str(refused.value).startswith(named)


def test_other_models_and_impossible_sizes_are_refused() -> None:
    for model in (GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)), LlamaModel(LlamaConfig(**SMALL))):
        with pytest.raises(ModelConfigError, match=r"^from_llama takes a LlamaForCausalLM"):
            from_llama(model)
    for fields, key in (({"num_key_value_heads": 3}, "num_key_value_heads: 3"), ({"head_dim": 5}, "head_dim: 5")):
        with pytest.raises(ModelConfigError, match=f"^{key}"):
            ImplicitLlama3Config(**{**SMALL, **fields})
    with pytest.raises(ModelConfigError, match=r"^rope_scaling.theta: linear has exactly the settings factor"):
        ImplicitLlama3Config(**SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0, "theta": 5.0})


def test_a_grouped_llama_becomes_implicit_and_its_modes_agree() -> None:
    solver = SolverConfig(tol=1e-9, eval_max_iter=400, eval_block_len=8, phantom_steps=2)
    model = to_implicit(from_llama(_llama(**KINDS["llama3"])), solver=solver).double().eval()
    assert model.model.injection.proj.out_features == (4 + 2 * 2) * 10
    assert flops.num_parameters(model.config.to_dict()) == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "injection" not in name:
                parameter.fill_(0.1)  # f contracts
        mask = torch.ones_like(INPUT_IDS)
        mask[0, :5] = 0
        found = model(INPUT_IDS, attention_mask=mask)
        by_token = sequential_forward(model, INPUT_IDS, attention_mask=mask)
    assert found.solver_stats.is_converged.all()
    torch.testing.assert_close(found.logits[mask.bool()], by_token.logits[mask.bool()], atol=1e-5, rtol=1e-5)
    model.train()(INPUT_IDS, labels=INPUT_IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
