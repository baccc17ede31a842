from typing import Any

import pytest

from implicit_llm_contracts.config.evaluation import (
    COUPLED_BATCH_SIZE,
    EvaluateConfig,
    EvaluateConfigError,
    ModeConfig,
    SweepConfig,
    modes_of,
    swept_modes,
)
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.errors import ConfigError

MODE = {"name": "a", "eval_mode": "blockwise"}


def test_mode_changes_only_what_it_names() -> None:
    trained = SolverConfig(max_iter=16, tau=0.5, eval_block_len=8)
    solver = ModeConfig("blocks", "blockwise", eval_max_iter=64, eval_tol=0.01).solver(trained)
    assert solver == SolverConfig(
        max_iter=16, tau=0.5, eval_block_len=8, eval_mode="blockwise", eval_max_iter=64, tol=0.01
    )


@pytest.mark.parametrize(
    ("mode", "saved", "size"),
    [
        (ModeConfig("released-criterion", "simultaneous", eval_stop="batch"), SolverConfig(), COUPLED_BATCH_SIZE),
        (ModeConfig("released-criterion", "simultaneous", eval_stop="batch", batch_size=512), SolverConfig(), 512),
        (ModeConfig("released-criterion", "simultaneous", eval_stop="batch"), None, None),
        (ModeConfig("simultaneous", "simultaneous"), SolverConfig(), None),
        # A model saved with the released code's criterion, in every mode that does not change it.
        (ModeConfig("blockwise", "blockwise"), SolverConfig(eval_stop="batch"), COUPLED_BATCH_SIZE),
        (ModeConfig("blockwise", "blockwise", eval_stop="sequence"), SolverConfig(eval_stop="batch"), None),
        # A model read as trained, where its training did.
        (ModeConfig("as_trained", "as_trained"), SolverConfig(stop="batch"), COUPLED_BATCH_SIZE),
        (ModeConfig("as_trained", "as_trained"), SolverConfig(eval_stop="batch"), None),
    ],
)
def test_a_rule_over_a_batch_makes_its_size_a_part_of_the_result(
    mode: ModeConfig, saved: SolverConfig | None, size: int | None
) -> None:
    assert mode.coupled_batch_size(saved) == size


def test_evaluation_ends_when_each_token_has_converged_unless_a_mode_or_a_saved_model_says_otherwise() -> None:
    assert ModeConfig("blockwise", "blockwise").solver(SolverConfig()).eval_stop == "token"
    assert ModeConfig("blockwise", "blockwise").solver(SolverConfig(eval_stop="sequence")).eval_stop == "sequence"
    assert ModeConfig("blockwise", "blockwise", eval_stop="batch").solver(SolverConfig()).eval_stop == "batch"


def test_a_sweep_changes_one_field_at_a_time_and_says_which() -> None:
    modes = (ModeConfig("blockwise", "blockwise", eval_max_iter=64, eval_tol=0.05),)
    swept = swept_modes(modes, SweepConfig(eval_max_iter=(1, 8), eval_tol=(0.2,)))
    assert [(mode.name, mode.eval_max_iter, mode.eval_tol) for mode in swept] == [
        ("blockwise@eval_max_iter=1", 1, 0.05),
        ("blockwise@eval_max_iter=8", 8, 0.05),
        ("blockwise@eval_tol=0.2", 64, 0.2),
    ]
    assert swept[1].record(SolverConfig())["sweep"] == {"base": "blockwise", "key": "eval_max_iter", "value": 8}
    assert swept[1].record(None)["sweep"] == {"base": "parallel", "key": None, "value": None}
    assert swept_modes(modes, None) == modes


def test_the_record_of_a_mode_has_the_settings_that_were_used_and_none_for_an_explicit_model() -> None:
    record = ModeConfig("blocks", "blockwise", eval_max_iter=64).record(SolverConfig(tol=0.03, eval_block_len=8))
    assert record == {
        "eval_mode": "blockwise",
        "eval_max_iter": 64,
        "eval_stop": SolverConfig().eval_stop,
        "eval_block_len": 8,
        "eval_tol": 0.03,
        "sweep": None,
    }
    assert set(ModeConfig("parallel", "simultaneous").record(None).values()) == {None}


@pytest.mark.parametrize(
    ("modes", "sweep", "named"),
    [
        ((), None, "no mode"),
        ((ModeConfig("a", "blockwise"), ModeConfig("a", "sequential")), None, "'a' is taken"),
        ((ModeConfig("parallel", "blockwise"),), None, "'parallel' is taken"),
        ((ModeConfig("a", "as_trained"),), SweepConfig((1, 2)), r"x\.sweep: mode 'a' is as_trained: give it an eval"),
    ],
)
def test_impossible_modes_and_a_sweep_of_one_that_takes_all_from_training_are_refused_by_key(
    modes: tuple[ModeConfig, ...], sweep: SweepConfig | None, named: str
) -> None:
    with pytest.raises(EvaluateConfigError, match=named):
        modes_of(modes, sweep, "x")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"eval_maxiter": 3}, "did you mean 'eval_max_iter'"),
        ({"eval_max_iter": 0}, r"modes\[0\]\.eval_max_iter: expected an integer from 1 to 1000000 or null, found 0"),
        ({"eval_tol": 1.5}, r"modes\[0\]\.eval_tol: expected a number above 0 and below 1 or null, found 1\.5"),
        (
            {"eval_mode": "as_trained", "eval_tol": 0.1},
            "eval_tol: the mode as_trained takes all settings from training",
        ),
        ({"eval_stop": "tokn"}, "eval_stop: there is no 'tokn'; did you mean 'token'"),
    ],
)
def test_a_wrong_setting_of_a_mode_is_named(setting: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fill(EvaluateConfig, {"kind": "word_problem", "modes": [MODE | setting]}, "x")


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (
            "word_problem",
            {"sweep": {"eval_tol": [0.2, 2.0]}},
            r"sweep\.eval_tol\[1\]: 2\.0 is not allowed; give a number",
        ),
        ("word_problem", {"precision": "fp8"}, "fp8"),
        ("perplexity", {"lengths": []}, "lengths: .* at least one entry"),
        ("perplexity", {"lengths": [1]}, "lengths.*at least 2"),
        ("perplexity", {"lengths": [16, 16]}, "lengths.*twice"),
        ("perplexity", {"lengths": [16], "max_tokens": 0}, "max_tokens"),
        ("perplexity", {"lengths": [16], "precision": "fp8"}, "fp8"),
        ("catbabi", {"protocols": []}, "protocols"),
        ("catbabi", {"protocols": ["carried", "carried"]}, "protocols"),
        ("catbabi", {"carried_max_tokens": 0}, "carried_max_tokens"),
        ("duality", {"lengths": []}, "lengths"),
        ("duality", {"max_tokens": 0}, "max_tokens"),
        ("duality", {"trace_tokens": 0}, "trace_tokens"),
        ("jacobian", {"positions": [1]}, "1 is not allowed; give an integer of at least 2"),
        ("jacobian", {"num_sequences": 0}, "num_sequences: 0 is not allowed"),
        ("lm_eval", {"tasks": []}, "tasks: .* at least one entry"),
        ("lm_eval", {"tasks": ["a", "a"]}, "none twice"),
        ("lm_eval", {"tasks": ["a"], "limit": 0}, "limit"),
        ("lm_eval", {"tasks": ["a"], "num_fewshot": -1}, "num_fewshot"),
        ("lm_eval", {"tasks": ["a"], "precision": "fp8"}, "fp8"),
    ],
)
def test_an_impossible_setting_of_a_kind_is_refused_by_key(kind: str, settings: dict[str, Any], named: str) -> None:
    modes = {} if kind == "jacobian" else {"modes": [MODE]}
    with pytest.raises(ConfigError, match=named):
        fill(EVALUATION_KINDS[kind].config, {"kind": kind, **modes, **settings}, "x")
