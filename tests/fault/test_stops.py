"""A curriculum that is stopped or killed at any step, or within one, ends bit for bit as if it had not been.

Twenty steps of two micro-batches: eight in an unrolled phase, the rest in a free one. Epochs end within steps 7, 13 and
19, and dropout draws random numbers in every step.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.fault.conftest import Trainer
from tests.unit.training.small_runs import FREE, IMPLICIT, UNROLLED, artifacts, logged, train_config

BORDER, STEPS, MICRO_STEPS = 8, 20, 2
MICRO = {"micro_batch_size": 4}


def phase(index: int) -> dict[str, Any]:
    start, end = ((0, BORDER), (BORDER, STEPS))[index]
    solver = (UNROLLED, FREE)[index]
    about = {"name": f"p{index}", "index": index, "start_step": start, "end_step": end, "solver": solver}
    return train_config(IMPLICIT, phase=about, total_steps=STEPS)


def run_phase(trainer: Trainer, root: Path, index: int, save_steps: int, **env: str) -> int:
    start = str(root / "a" / "p0") if index else None
    order = {"start": start, "runtime": {**MICRO, "save_steps": save_steps}}
    return trainer.run(root / "a" / f"p{index}", phase(index), order, **env)


def outcome(root: Path) -> list[tuple[dict[str, str], list]]:
    """Digests of weights, optimizer, random states and metrics, and all points of the journal, of both phases."""
    return [(artifacts(run_dir), logged(run_dir)) for run_dir in (root / "a" / "p0", root / "a" / "p1")]


@pytest.fixture(scope="module")
def undisturbed(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, str], list]]:
    root = tmp_path_factory.mktemp("undisturbed")
    assert [run_phase(trainer, root, index, save_steps=100) for index in (0, 1)] == [0, 0]
    found = outcome(root)
    assert [step for _, points in found for step, _ in points] == list(range(1, STEPS + 1))
    return found


def check(trainer: Trainer, undisturbed: list, root: Path, fault: str, hit: int, per_step: int, save_steps: int) -> int:
    """Run both phases with a fault at its passage number `hit` of the whole; exit code of the phase that had it."""
    code = 0
    for index, before in enumerate((0, BORDER * per_step)):
        is_here = before < hit <= (BORDER, STEPS)[index] * per_step
        if is_here:
            code = run_phase(trainer, root, index, save_steps, IMPLICIT_LLM_FAULT=f"{fault}@{hit - before}")
        if not is_here or code:
            assert run_phase(trainer, root, index, save_steps) == 0
    assert outcome(root) == undisturbed
    return code


def each(count: int, *fast: int) -> list[Any]:
    """All numbers to this one; those that are not named are slow."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in range(1, count + 1)]


@pytest.mark.parametrize("step", each(STEPS, 1, BORDER, 13))
def test_a_stop_after_a_step_changes_nothing(trainer: Trainer, undisturbed: list, tmp_path: Path, step: int) -> None:
    code = check(trainer, undisturbed, tmp_path, "train.after_step:sigterm", step, per_step=1, save_steps=100)
    assert code == (0 if step in (BORDER, STEPS) else 75)


@pytest.mark.parametrize("micro_step", each(STEPS * MICRO_STEPS, 2, 2 * BORDER + 2))
def test_a_kill_within_a_step_changes_nothing(
    trainer: Trainer, undisturbed: list, tmp_path: Path, micro_step: int
) -> None:
    fault = "train.micro_step:kill9"
    assert check(trainer, undisturbed, tmp_path, fault, micro_step, per_step=MICRO_STEPS, save_steps=3) == -9


@pytest.mark.slow
def test_a_stop_in_every_single_step_changes_nothing(trainer: Trainer, undisturbed: list, tmp_path: Path) -> None:
    for index, num_steps in enumerate((BORDER, STEPS - BORDER)):
        codes = [
            run_phase(trainer, tmp_path, index, 100, IMPLICIT_LLM_FAULT="train.after_step:sigterm@1")
            for _ in range(num_steps)
        ]
        assert codes == [75] * (num_steps - 1) + [0]
    assert outcome(tmp_path) == undisturbed
