"""Journals of training as curves."""

import math
from dataclasses import replace

import pytest

from implicit_llm_contracts.runs.journal import Point
from implicit_llm_report.inputs.training_runs import FLOPS, LOSS, MAX_POINTS, STEP, TOKENS, Phase, Solver, TrainingRun

BOUNDED = Solver("fixed_point", 4, 1)
FREE = Solver("fixed_point", 24, 4)


def phase(name: str, first: int, end: int, solver: Solver, **changes: object) -> Phase:
    """A phase with loss 1000 / step, lower by 1 in a branch, and 10 FLOPs a step."""
    lower = 1.0 if first else 0.0
    points = tuple(
        Point(step, "", {"loss": 1000 / step - lower, "flops": 10.0 * step}) for step in range(first + 1, end + 1)
    )
    fields = {"fingerprint": name, "start": None, "step_tokens": 7} | changes
    return Phase("train:" + name, name, first, end, solver, points, **fields)  # type: ignore[arg-type]


TRUNK, BRANCH = phase("bounded", 0, 1000, BOUNDED), phase("free-80", 800, 1000, FREE, start="bounded")
RUN = TrainingRun("run", 0, (TRUNK, BRANCH), "language_model")


def test_a_branch_goes_along_its_trunk_up_to_its_first_step_and_the_trunk_goes_on() -> None:
    trunk, branch = RUN.along(TRUNK, LOSS, TOKENS), RUN.along(BRANCH, LOSS, TOKENS)
    assert list(dict.fromkeys(branch.index.get_level_values(0))) == ["bounded", "free-80"]
    on_trunk, own = branch.loc["bounded"], branch.loc["free-80"]
    assert on_trunk.iloc[-1].to_dict() == pytest.approx({STEP: 800, TOKENS: 800 * 7, LOSS: 1000 / 800}, rel=0.02)
    assert own[LOSS].iloc[0] < 0.5
    assert trunk[STEP].iloc[-1] > 980


def test_tokens_are_counted_from_steps_where_the_journal_has_none() -> None:
    trunk = TRUNK.curve(LOSS, TOKENS)
    assert trunk[TOKENS].to_list() == pytest.approx((7 * trunk[STEP]).to_list())


def test_curve_of_many_points_is_thinned_and_bins_are_the_same_for_a_seed_that_stopped_early() -> None:
    whole, half = TRUNK.curve(LOSS), replace(TRUNK, points=TRUNK.points[:500]).curve(LOSS)
    assert len(whole) == MAX_POINTS
    assert 400 < half[STEP].iloc[-1] <= 500
    assert half.iloc[:-1].equals(whole.iloc[: len(half) - 1])


def test_missing_losses_and_flops_leave_an_empty_curve_and_no_zero() -> None:
    points = tuple(Point(step, "", {"loss": math.nan if step == 3 else 2.0}) for step in range(1, 6))
    bare = Phase("train:x", "x", 0, 5, None, points)
    assert bare.curve(LOSS, FLOPS).empty
    assert replace(bare, step_tokens=2).curve(LOSS, TOKENS)[STEP].to_list() == [1, 2, 4, 5]
    assert bare.end_loss == 2.0
    assert replace(bare, points=()).end_loss is None


def test_a_run_ends_in_the_phases_that_no_other_goes_on_from() -> None:
    first, second = phase("a", 0, 10, BOUNDED), phase("b", 10, 30, FREE, start="a")
    branch, other = phase("c", 20, 30, FREE, start="b"), phase("d", 10, 30, FREE, start="a")
    run = TrainingRun("run", 0, (first, second, other, branch))
    assert [one.name for one in run.last_phases] == ["b", "d", "c"]
    assert [one.name for one in run.path(branch)] == ["a", "b", "c"]
