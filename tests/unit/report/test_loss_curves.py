from __future__ import annotations

import math

import numpy as np
import pytest

from implicit_llm_contracts.runs.journal import Point
from implicit_llm_report.loss import (
    AMOUNT,
    BRANCH_BINS,
    EARLY_BINS,
    LATE_BINS,
    STEP,
    VALUE,
    loss_at,
    path_curve,
    phase_curves,
)
from implicit_llm_report.model_groups import Model, ModelGroup
from implicit_llm_report.training_runs import FLOPS, TOKENS, Phase, TrainingRun

BOUNDED = {"mode": "fixed_point", "max_iter": 4, "phantom_steps": 1}
FREE = {"mode": "fixed_point", "max_iter": 24, "phantom_steps": 4}
GROUP = ModelGroup("Mamba2", (Model("run", True, "implicit_mamba2", 100),))


def phase(name: str, first: int, end: int, solver: dict, **changes: object) -> Phase:
    """A phase with loss 1000 / step, lower by 1 in a branch, and 10 FLOPs a step."""
    lower = 1.0 if first else 0.0
    points = tuple(
        Point(step, "", {"loss": 1000 / step - lower, "flops": 10.0 * step}) for step in range(first + 1, end + 1)
    )
    fields = {"fingerprint": name, "start": None, "step_tokens": 7} | changes
    return Phase("train:" + name, name, first, end, solver, points, **fields)  # type: ignore[arg-type]


def run_of(seed: int = 0, end: int = 1000) -> TrainingRun:
    trunk = phase("bounded", 0, end, BOUNDED)
    branch = phase("free-80", round(0.8 * end), end, FREE, start="bounded")
    return TrainingRun("run", seed, (trunk, branch), "language_model", "implicit_mamba2", 100)


def test_branch_starts_on_the_trunk_at_its_first_step_and_the_trunk_goes_on() -> None:
    trunk, branch = phase_curves([run_of()], GROUP, TOKENS)
    assert (trunk.is_branch, branch.is_branch) == (False, True)
    assert branch.mean[0, STEP] == 800
    assert branch.mean[0, AMOUNT] == pytest.approx(800 * 7)
    assert branch.mean[0, VALUE] == pytest.approx(1000 / 800, rel=0.02)
    assert branch.mean[1, VALUE] < 0.5
    assert trunk.mean[-1, STEP] > 980


def test_tokens_are_counted_from_steps_where_the_journal_has_none() -> None:
    (trunk, _) = phase_curves([run_of()], GROUP, TOKENS)
    assert trunk.mean[:, AMOUNT] == pytest.approx(7 * trunk.mean[:, STEP])


def test_curve_of_many_points_is_thinned_and_keeps_both_ends() -> None:
    trunk, branch = phase_curves([run_of(end=200_000)], GROUP, FLOPS)
    assert len(trunk.mean) <= EARLY_BINS + LATE_BINS
    assert len(branch.mean) <= BRANCH_BINS + 1
    assert trunk.mean[0, STEP] == 1
    assert trunk.mean[-1, STEP] > 0.99 * 200_000


def test_mean_over_seeds_is_taken_bin_by_bin_over_the_seeds_that_are_there() -> None:
    whole = run_of()
    half = TrainingRun("run", 1, (Phase(**{**vars(whole.phases[0]), "points": whole.phases[0].points[:500]}),))
    (trunk, _) = phase_curves([whole, half], GROUP, FLOPS)
    assert len(trunk.seeds) == 2
    assert trunk.seeds[1][-1, STEP] <= 500 < trunk.mean[-1, STEP]
    np.testing.assert_allclose(trunk.mean[:, VALUE], trunk.seeds[0][:, VALUE], rtol=0.05)


def test_missing_losses_and_flops_leave_an_empty_curve_and_no_zero() -> None:
    points = tuple(Point(step, "", {"loss": math.nan if step == 3 else 2.0}) for step in range(1, 6))
    bare = Phase("train:x", "x", 0, 5, None, points)
    (curve,) = phase_curves([TrainingRun("run", 0, (bare,))], GROUP, FLOPS)
    assert curve.mean.shape == (0, 3)
    (curve,) = phase_curves([TrainingRun("run", 0, (Phase(**{**vars(bare), "step_tokens": 2}),))], GROUP, TOKENS)
    assert 3 not in curve.mean[:, STEP]
    assert set(curve.mean[:, VALUE]) == {2.0}


def test_loss_at_follows_the_path_to_a_phase_and_says_nothing_beyond_its_end() -> None:
    run = run_of()
    curve = path_curve(run, run.phases[1], FLOPS)
    assert loss_at(curve, 10 * 400) == pytest.approx(1000 / 400, rel=0.02)  # on the trunk
    assert loss_at(curve, 10 * 900) == pytest.approx(1000 / 900 - 1, rel=0.05)  # on the branch
    assert loss_at(curve, 10 * 1001) is None
    assert loss_at(curve[:0], 10) is None


def test_phases_that_follow_each_other_are_one_chain_and_branches_are_others() -> None:
    first, second = phase("a", 0, 10, BOUNDED), phase("b", 10, 30, FREE, start="a")
    branch, other = phase("c", 20, 30, FREE, start="b"), phase("d", 10, 30, FREE, start="a")
    run = TrainingRun("run", 0, (first, second, other, branch))
    assert [[p.name for p in chain] for chain in run.chains] == [["a", "b"], ["d"], ["c"]]
    assert [p.name for p in run.path(branch)] == ["a", "b", "c"]
