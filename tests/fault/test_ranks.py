"""Two processes train together, and one of them goes wrong: both stop before it reaches the weights, and say why."""

import json
from pathlib import Path

import pytest

from tests.fault.conftest import Trainer
from tests.unit.training.distributed_run import CONFIGS
from tests.unit.training.small_runs import saved, work_of


@pytest.mark.parametrize(
    ("what", "failure", "updates", "message"),
    [
        ("loss", "non_finite", 3, "the gradient norm nan at step 4 (samples "),
        ("solver", "non_finite", 3, "rank 1: the fixed-point iteration became NaN at position 5 at step 4 (samples "),
        ("memory", "node_fail", 4, "after step 4 the weights of rank 1 are not those of rank 0"),  # at the next save
    ],
)
def test_what_goes_wrong_on_one_rank_stops_both_before_the_next_checkpoint(
    trainer: Trainer, run_dir: Path, tmp_path: Path, what: str, failure: str, updates: int, message: str
) -> None:
    run_dir.mkdir(parents=True)
    order, status = {"processes": 2, "poison": {"rank": 1, "step": 4, "what": what}}, tmp_path / "status.json"
    assert trainer.run(run_dir, CONFIGS["implicit"], order, SUBMITIT_JOB_STATUS=str(status)) == 2
    assert saved(run_dir) == ["step-00000002", "step-00000003"]
    for rank in (0, 1):
        end = json.loads((run_dir / f"rank-{rank}.json").read_text())
        assert (end["class"], end["updates"]) == (failure, updates)
        assert message in end["message"]
    told = json.loads(status.read_text())
    assert (told["progress"], told["failure_class"]) == (3, failure)
    if failure == "non_finite":
        report = json.loads((work_of(run_dir) / "non_finite.json").read_text())
        assert (report["step"], len(report["sample_indices"])) == (4, 8)
        assert all(row["residual"] > 0 for row in report["recent"][:3])
