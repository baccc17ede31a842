import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from implicit_llm.training.distributed import weights_checksum
from implicit_llm.training.optimizer import build_optimizer, is_matrix
from implicit_llm.training.state import (
    StateMismatch,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from implicit_llm_contracts.config.training import OptimizerConfig
from tests.unit.training.small_runs import IMPLICIT, LLAMA

ADAMW = OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)


def make(fields: dict = LLAMA, **changes: object) -> torch.nn.Module:
    fields = {**fields, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def test_tied_weights_are_stored_once_and_stay_tied_when_loaded() -> None:
    source, target = make(tie_word_embeddings=True), make(tie_word_embeddings=True)
    assert "lm_head.weight" not in model_tensors(source)
    assert "lm_head.weight" in model_tensors(make(tie_word_embeddings=False))
    load_model(target, model_tensors(source), "here")
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_weights_of_another_architecture_are_refused_by_name() -> None:
    with pytest.raises(StateMismatch, match=r"here: model\.embed_tokens\.weight has shape \(6, 16\).*\(7, 16\)"):
        load_model(make(vocab_size=7), model_tensors(make()), "here")
    with pytest.raises(StateMismatch, match=r"here: lacks model\.layers\.1"):
        load_model(make(num_hidden_layers=2), model_tensors(make()), "here")


def test_stored_optimizer_settings_do_not_replace_those_of_the_config() -> None:
    model = make()
    optimizer = build_optimizer(model, ADAMW)
    model(torch.tensor([[0, 1, 2, 3]])).logits.square().sum().backward()
    optimizer.step()
    restored = build_optimizer(model, OptimizerConfig(0.5, 0.6, 1e-6, 0.2, 1.0))
    load_optimizer(restored, model, optimizer_tensors(optimizer, model), "here")
    assert restored.param_groups[0]["betas"] == (0.5, 0.6)
    assert restored.param_groups[0]["weight_decay"] == 0.2


def test_optimizer_state_of_another_model_is_refused() -> None:
    model = make()
    with pytest.raises(StateMismatch, match="does not train; all phases of a curriculum need the same model"):
        load_optimizer(build_optimizer(model, ADAMW), model, {"gone.weight.exp_avg": torch.zeros(1)}, "here")
    some = {"model.norm.weight.exp_avg": torch.zeros(16)}
    with pytest.raises(StateMismatch, match="lacks lm_head"):
        load_optimizer(build_optimizer(model, ADAMW), model, some, "here")


def test_only_matrices_decay() -> None:
    model = make(IMPLICIT)
    decayed = {name for name, parameter in model.named_parameters() if is_matrix(parameter)}
    kept = {name: parameter for name, parameter in model.named_parameters() if name not in decayed}
    assert len(decayed) == 5  # embedding, injection, in-projection, convolution, out-projection
    assert all(max(weight.shape) == weight.numel() for weight in kept.values())  # gains of shape (N, 1) as well
    assert {"dt_bias", "A_log"} <= {name.rpartition(".")[2] for name in kept}


def test_random_state_brings_back_all_generators() -> None:
    values, tensors = random_state()
    drawn = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    set_random_state(values, tensors)
    assert drawn == (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())


def test_a_checksum_tells_weights_apart_by_one_bit() -> None:
    model = make(IMPLICIT)
    before = weights_checksum(model)
    assert weights_checksum(model) == before
    next(model.parameters()).data.view(-1).view(torch.int32)[5] ^= 1
    assert weights_checksum(model) != before
