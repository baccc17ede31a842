"""Wrong values are refused by key; the rate, the weights and the solver that a config gives."""

import math
from typing import Any

import pytest

from implicit_llm.training.model import ModelError, build_model
from implicit_llm.training.optimizer import learning_rate
from implicit_llm_contracts.config.training import Runtime, ScheduleConfig, TrainConfig
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from tests.refusals import refused
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
    with refused(f"^train/x.*{message}", ConfigError):
        filled({**train_config(), **changes, "phase": phase})


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
    with refused(message, (ModelError, ValueError)) as caught:
        build_model(config, vocab_size=6, where="train/x")
    assert caught.value.exit_code == 2


def test_the_seed_alone_decides_the_initial_weights() -> None:
    first, second, other = (
        build_model(filled(train_config(seed=seed)), 6, "x").backbone.embeddings.weight for seed in (1, 1, 2)
    )
    assert first.equal(second)
    assert not first.equal(other)


LINEAR = ScheduleConfig("linear", peak_learning_rate=1.0, final_learning_rate=0.0, warmup_fraction=0.1)
STABLE = ScheduleConfig("warmup_stable_decay", 1.0, 0.01, warmup_fraction=0.1, decay_fraction=0.2)


def test_linear_rises_to_the_peak_and_falls_to_the_end() -> None:
    rates = [learning_rate(LINEAR, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(LINEAR, 9, 96) == 1.0 > learning_rate(LINEAR, 8, 96)  # at the next whole step after 9.6
    assert learning_rate(ScheduleConfig("linear", 0.5, 0.0, warmup_fraction=0.0), 0, 10) == 0.5


def test_stable_part_keeps_the_peak_and_the_decay_is_one_minus_square_root() -> None:
    rates = [learning_rate(STABLE, step, 100) for step in range(100)]
    assert rates[10:81] == [1.0] * 71
    for step in range(80, 100):
        assert rates[step] == pytest.approx(0.01 + 0.99 * (1 - math.sqrt((step - 80) / 20)))
    assert rates[99] > 0.01


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "linear", "decay_fraction": 0.2}, "decay_fraction"),
        ({"decay_fraction": None}, "decay_fraction"),
        ({"decay_fraction": 0.95}, "warmup_fraction"),
        ({"warmup_fraction": 1.5}, "warmup_fraction"),
        ({"peak_learning_rate": 0.0}, "peak_learning_rate"),
        ({"final_learning_rate": 2.0}, "final_learning_rate"),
        ({"peak_learning_rate": math.nan}, "peak_learning_rate"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_key(changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ScheduleConfig(**{**STABLE.__dict__, **changes})
