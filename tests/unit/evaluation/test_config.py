from __future__ import annotations

import pytest

from implicit_llm.evaluation.config import (
    COUPLED_BATCH_SIZE,
    EvaluateConfig,
    EvaluateConfigError,
    ModeConfig,
    check_modes,
)
from implicit_llm.runs.fill import ConfigError, fill
from implicit_llm.solver.config import SolverConfig


def test_mode_changes_only_what_it_names() -> None:
    trained = SolverConfig(max_iter=16, tau=0.5, eval_block_len=8)
    solver = ModeConfig("blocks", "blockwise", eval_max_iter=64, eval_tol=0.01).solver(trained)
    assert solver == SolverConfig(
        max_iter=16, tau=0.5, eval_block_len=8, eval_mode="blockwise", eval_max_iter=64, tol=0.01
    )


def test_published_mode_stops_by_one_norm_over_a_batch_whose_size_is_part_of_the_result() -> None:
    published = ModeConfig("published", "simultaneous")
    assert published.solver(SolverConfig()).eval_stop == "batch"
    assert published.coupled_batch_size == COUPLED_BATCH_SIZE
    assert ModeConfig("published", "simultaneous", batch_size=512).coupled_batch_size == 512
    assert ModeConfig("simultaneous", "simultaneous").coupled_batch_size is None


@pytest.mark.parametrize(
    ("modes", "named"),
    [
        ((), "no mode"),
        ((ModeConfig("a", "blockwise"), ModeConfig("a", "sequential")), "'a' is taken"),
        ((ModeConfig("parallel", "blockwise"),), "'parallel' is taken"),
        ((ModeConfig("a", "blockwise", eval_max_iter=0),), r"evaluate\.modes\.a\.eval_max_iter"),
        ((ModeConfig("a", "blockwise", eval_tol=1.5),), r"evaluate\.modes\.a\.eval_tol"),
    ],
)
def test_impossible_modes_are_refused_by_key(modes: tuple[ModeConfig, ...], named: str) -> None:
    with pytest.raises(EvaluateConfigError, match=named):
        check_modes(modes, "evaluate.modes")


def test_unknown_key_of_a_mode_names_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match="eval_max_iter"):
        fill(
            EvaluateConfig,
            {"kind": "word_problem", "modes": [{"name": "a", "eval_mode": "blockwise", "eval_maxiter": 3}]},
            "x",
        )
