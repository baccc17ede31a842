"""Two processes train together, and one of them goes wrong: both stop before it reaches the weights, and say why."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fault.conftest import Trainer
from tests.unit.training.distributed_run import CONFIGS
from tests.unit.training.small_runs import work_of


def run_poisoned(trainer: Trainer, run_dir: Path, what: str, status: Path) -> list[dict[str, Any]]:
    """How both processes end when rank 1 goes wrong in step 4."""
    run_dir.mkdir(parents=True)
    order = {"processes": 2, "poison": {"rank": 1, "step": 4, "what": what}}
    assert trainer.run(run_dir, CONFIGS["implicit"], order, SUBMITIT_JOB_STATUS=str(status)) == 2
    steps = sorted(path.name for path in (work_of(run_dir) / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000003"]
    return [json.loads((run_dir / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("what", "message"),
    [("loss", "the gradient norm nan"), ("solver", "rank 1: the fixed-point iteration became NaN at position 5")],
)
def test_what_is_not_finite_on_one_rank_stops_both_before_the_update(
    trainer: Trainer, run_dir: Path, tmp_path: Path, what: str, message: str
) -> None:
    status = tmp_path / "status.json"
    for end in run_poisoned(trainer, run_dir, what, status):
        assert end["class"] == "non_finite"
        assert end["updates"] == 3
        assert message in end["message"]
        assert "at step 4 (samples " in end["message"]
    report = json.loads((work_of(run_dir) / "non_finite.json").read_text())
    assert (report["step"], len(report["sample_indices"])) == (4, 8)
    assert all(row["residual"] > 0 for row in report["recent"][:3])
    told = json.loads(status.read_text())
    assert (told["progress"], told["failure_class"]) == (3, "non_finite")


def test_one_flipped_bit_in_the_weights_of_one_rank_is_found_at_the_next_save(
    trainer: Trainer, run_dir: Path, tmp_path: Path
) -> None:
    for end in run_poisoned(trainer, run_dir, "memory", tmp_path / "status.json"):
        assert end["class"] == "node_fail"
        assert "after step 4 the weights of rank 1 are not those of rank 0" in end["message"]
