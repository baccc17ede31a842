"""Whatever happens to a training process wherever, the next start ends with the same result.

Where one of two processes that train together goes wrong, both stop before it reaches the weights, and say why.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from implicit_llm.training.operations.checkpoint import Checkpoint, CorruptCheckpoint, read_checkpoint
from implicit_llm_contracts.runs import faults, journal
from implicit_llm_contracts.runs.manifest import Manifest
from tests.fault.conftest import Trainer
from tests.fault.forks import LIBRARY
from tests.fault.points import passage, registered, sample
from tests.unit.training.small_runs import CONFIGS, LLAMA, flip_last_byte, logged, saved, train_config, work_of

POINTS = registered(LIBRARY / "training")
EXIT_CODES = {"kill9": (-9,), "sigterm": (75, 0), "raise": (1,), "enospc": (0, 1, 2, 75)}
STEPS = 5


@dataclass(frozen=True)
class Way:
    """A way through a phase of five steps.

    damaged: a checkpoint below work that is damaged after a first attempt, which a crash ended in the last step.
    fault: comes on top of the fault that is tried.
    """

    keep: tuple[int, ...] = (2,)
    damaged: str = ""
    fault: str = ""

    def run(self, trainer: Trainer, run_dir: Path, **env: str) -> int:
        phase = {"end_step": STEPS, "keep": list(self.keep)}
        return trainer.run(run_dir, train_config(LLAMA, phase=phase, total_steps=STEPS), **env)

    def prepare(self, trainer: Trainer, run_dir: Path) -> None:
        if self.damaged:
            assert self.run(trainer, run_dir, IMPLICIT_LLM_FAULT=f"train.after_step:raise@{STEPS}") == 1
            flip_last_byte(work_of(run_dir) / self.damaged / "model.safetensors")


WAYS = (
    Way(),
    Way(keep=(2, 5)),  # the last state is kept too, and so copied and not moved
    Way(damaged="checkpoints/step-00000004"),
    Way(damaged="kept/step-00000002"),
    Way(fault="train.after_step:sigterm@3"),
)


class Undisturbed:
    """What a way without further faults gives."""

    def __init__(self, trainer: Trainer, tmp_path: Path, way: Way) -> None:
        run_dir, trace = tmp_path / "a" / "only", tmp_path / "trace"
        self.way = way
        way.prepare(trainer, run_dir)
        assert way.run(trainer, run_dir, IMPLICIT_LLM_FAULT=way.fault, IMPLICIT_LLM_FAULT_TRACE=str(trace)) == (
            75 if way.fault else 0
        )
        self.hits = Counter(trace.read_text().split())
        assert way.run(trainer, run_dir) == 0
        self.manifest = (run_dir / "manifest.json").read_bytes()
        self.points = logged(run_dir)


@pytest.fixture(scope="module")
def all_undisturbed(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[Undisturbed]:
    return [Undisturbed(trainer, tmp_path_factory.mktemp("undisturbed"), way) for way in WAYS]


@pytest.fixture
def undisturbed(all_undisturbed: list[Undisturbed], point: str) -> Undisturbed:
    """The first way that passes the point."""
    return next(undisturbed for undisturbed in all_undisturbed if undisturbed.hits[point])


def whole_checkpoints(run_dir: Path, *, has_damaged: bool) -> list[Checkpoint]:
    """All checkpoints with a final name, each of which is whole, but for one that the test damaged."""
    below = ("checkpoint", "checkpoints/step-????????", "kept/step-????????")
    found = []
    for path in [path for pattern in below for path in run_dir.glob(f"work/*/{pattern}")]:
        try:
            found.append(read_checkpoint(path))
        except CorruptCheckpoint:
            assert has_damaged, path
    return found


def check_what_is_there(run_dir: Path, *, has_damaged: bool) -> None:
    """Right after a fault: what has a final name is whole, and from the first commit on there is a checkpoint."""
    for path in run_dir.glob("work/*/manifest.json"):
        Manifest.read(path).verify(run_dir)
    events = [
        event.get("name") for path in run_dir.glob("work/*/journal.jsonl") for event in journal.read_records(path)
    ]
    checkpoints = whole_checkpoints(run_dir, has_damaged=has_damaged)
    # Those after a kept one that was lost are given up: training starts again.
    given_up = max((number for number, name in enumerate(events) if name == "kept_checkpoint_lost"), default=0)
    assert checkpoints or "checkpoint_committed" not in events[given_up:]


def check_fault(trainer: Trainer, undisturbed: Undisturbed, run_dir: Path, fault: tuple[str, str, int]) -> None:
    point, kind, hit = fault
    way = undisturbed.way
    way.prepare(trainer, run_dir)
    assert way.run(trainer, run_dir, IMPLICIT_LLM_FAULT=f"{way.fault},{point}:{kind}@{hit}") in EXIT_CODES[kind]
    check_what_is_there(run_dir, has_damaged=bool(way.damaged))
    before = kept_ones(run_dir)

    assert way.run(trainer, run_dir) == 0
    assert (run_dir / "manifest.json").read_bytes() == undisturbed.manifest
    assert logged(run_dir) == undisturbed.points
    assert list(run_dir.rglob("*.tmp*")) == []
    assert not (work_of(run_dir) / "checkpoints").exists()
    if not way.damaged:
        assert kept_ones(run_dir).items() >= before.items(), "a kept checkpoint was made again"
    assert len(kept_ones(run_dir)) == len(way.keep)


def kept_ones(run_dir: Path) -> dict[str, int]:
    """Kept checkpoints by name, with what tells a directory from another one of the same name."""
    return {path.name: path.stat().st_ino for path in run_dir.glob("work/*/kept/step-????????")}


def test_the_ways_pass_every_fault_point(all_undisturbed: list[Undisturbed]) -> None:
    passed = {point for undisturbed in all_undisturbed for point in undisturbed.hits}
    assert sorted(passed & set(POINTS)) == list(POINTS)


def test_damage_and_stops_change_nothing(all_undisturbed: list[Undisturbed]) -> None:
    first, *others = (undisturbed for undisturbed in all_undisturbed if undisturbed.way.keep == (2,))
    assert [other.manifest for other in others] == [first.manifest] * 3
    assert [other.points for other in others] == [first.points] * 3


@pytest.mark.parametrize(("point", "kind"), sample(POINTS))
def test_a_restart_after_a_fault_ends_as_if_nothing_had_happened(
    trainer: Trainer, undisturbed: Undisturbed, run_dir: Path, point: str, kind: str
) -> None:
    check_fault(trainer, undisturbed, run_dir, (point, kind, passage(kind, undisturbed.hits[point])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_restart_after_a_fault_at_any_passage_ends_as_if_nothing_had_happened(
    trainer: Trainer, all_undisturbed: list[Undisturbed], tmp_path: Path, point: str, kind: str
) -> None:
    for number, undisturbed in enumerate(all_undisturbed):
        for hit in range(1, undisturbed.hits[point] + 1):
            check_fault(trainer, undisturbed, tmp_path / f"{number}-{hit}" / "a" / "only", (point, kind, hit))


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
