from __future__ import annotations

from typing import Any

import pytest

from implicit_llm.training.model import ModelError, build_model
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from tests.unit.training.small_runs import FREE, IMPLICIT, LLAMA, train_config


def filled(config: dict[str, Any]) -> TrainConfig:
    return fill(TrainConfig, config, "train/x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsize": 8}, r"unknown key 'batchsize'.*batch_size"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"labels": "shifted"}, "aligned, next_token"),
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"phase": {"solver": {**FREE, "max_itr": 3}}}, "phase.solver: .*max_iter"),
        ({"phase": {"solver": {**FREE, "tol": 3.0}}}, "phase.solver.tol: 3.0"),
        ({"phase": {"start_step": -1}}, r"phase\.start_step: -1 .*at least 0"),
        ({"phase": {"start_step": 7, "end_step": 7}}, r"phase\.end_step: 7 .*give more than start_step, 7"),
        ({"phase": {"end_step": 9}, "total_steps": 8}, r"total_steps: 8 .*give at least phase\.end_step, 9"),
        ({"model": {"pretrained": "owner/gpt2", "revision": "main"}}, r"model\.revision: 'main' is no commit; give"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**32}, "seed"),
        ({"optimizer": {"beta1": 0.9, "beta2": 1.0, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}}, "beta2"),
        (
            {"optimizer": {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}},
            "max_grad",
        ),
        ({"optimizer": {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}}, "max_grad_norm' is missing"),
    ],
)
def test_a_wrong_value_is_refused_by_key_in_one_line(changes: dict[str, Any], message: str) -> None:
    phase = {**train_config()["phase"], **changes.pop("phase", {})}
    with pytest.raises(ConfigError, match=message) as caught:
        filled({**train_config(), **changes, "phase": phase})
    assert str(caught.value).startswith("train/x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threads": 0}, r"threads: .*found 0"),
        ({"device": "gpu"}, "auto, cpu, cuda"),
        ({"save_evry_s": 1}, "save_every_s"),
    ],
)
def test_a_wrong_runtime_option_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(Runtime, values, "runtime")


@pytest.mark.parametrize(
    ("model", "solver", "message"),
    [
        ({**LLAMA, "model_type": "lama"}, None, r"model_type: .*'lama'; did you mean 'llama'"),
        ({**LLAMA, "hiden_size": 16}, None, r"model\.hiden_size: .* did you mean 'hidden_size'"),
        ({**LLAMA, "vocab_size": 5}, None, r"vocab_size: 5 tokens are fewer than the 6"),
        (LLAMA, FREE, r"phase\.solver: the model is explicit"),
        (IMPLICIT, None, r"phase\.solver: the model is implicit"),
        ({**IMPLICIT, "head_dim": 7}, FREE, "head_dim"),
    ],
)
def test_a_model_that_cannot_be_is_refused_as_the_users_error(
    model: dict[str, Any], solver: dict[str, Any] | None, message: str
) -> None:
    config = filled(train_config(model, phase={"solver": solver}))
    with pytest.raises((ModelError, ValueError), match=message) as caught:
        build_model(config, vocab_size=6, where="train/x")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_the_seed_alone_decides_the_initial_weights() -> None:
    first, second, other = (
        build_model(filled(train_config(seed=seed)), 6, "x").backbone.embeddings.weight for seed in (1, 1, 2)
    )
    assert first.equal(second)
    assert not first.equal(other)


def test_the_phase_gives_the_model_its_solver() -> None:
    model = build_model(filled(train_config(phase={"solver": {"mode": "unrolled", "num_unroll": 3}})), 6, "x")
    assert (model.solver.mode, model.solver.num_unroll) == ("unrolled", 3)
