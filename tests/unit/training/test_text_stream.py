"""Language models on a real stream of tokens, as the data stages make it from text files."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.errors import Preempted
from implicit_llm_contracts.runs.faults import FaultInjected
from tests.unit.data.text_samples import VOCAB_SIZE, Project, write_corpus
from tests.unit.training.small_runs import FREE, IMPLICIT, UNROLLED, Inject, artifacts, logged, train, train_config


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a training stream that lies in three shards."""
    project = Project(tmp_path_factory.mktemp("project"))
    project.run_all(write_corpus(project.downloads, documents_per_file=8), num_shards=3)
    return project.root / "results" / "data" / "x-train"


def config_of(**phase: Any) -> dict[str, Any]:
    model = {**IMPLICIT, "vocab_size": VOCAB_SIZE + 4}  # padded, as published
    return train_config(model, task="language_model", labels="next_token", phase=phase)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, stream: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "only"
    train(run_dir, config_of(), stream, micro_batch_size=4)
    return run_dir


def test_it_learns(whole: Path) -> None:
    losses = [values["loss"] for _, values in logged(whole)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("micro_step", range(1, 17))
def test_a_crash_in_any_micro_step_changes_nothing(
    tmp_path: Path, stream: Path, inject: Inject, whole: Path, micro_step: int
) -> None:
    run_dir = tmp_path / "a" / "only"
    with inject(f"train.micro_step:raise@{micro_step}"), pytest.raises(FaultInjected):
        train(run_dir, config_of(), stream, micro_batch_size=4, save_steps=2)
    train(run_dir, config_of(), stream, micro_batch_size=4)
    assert artifacts(run_dir) == artifacts(whole)
    assert logged(run_dir) == logged(whole)


def test_a_curriculum_of_two_phases_stopped_at_and_beside_their_border_ends_the_same(
    tmp_path: Path, stream: Path, inject: Inject
) -> None:
    first = {"name": "bounded", "end_step": 5, "solver": UNROLLED, "keep": [4]}
    second = {"name": "free", "index": 1, "start_step": 5, "end_step": 8, "solver": FREE}
    for name, faults in (("x", (None, None)), ("y", (4, 1)), ("z", (5, 2))):
        for phase, fault in ((first, faults[0]), (second, faults[1])):
            run_dir, start = tmp_path / name / phase["name"], tmp_path / name / "bounded"
            given = None if phase is first else start
            if fault is not None:
                at_the_end = phase is first and fault == 5
                stop = nullcontext() if at_the_end else pytest.raises(Preempted)
                with inject(f"train.after_step:sigterm@{fault}"), stop:
                    train(run_dir, config_of(**phase), stream, given)
            train(run_dir, config_of(**phase), stream, given)
    for name in ("y", "z"):
        for phase in ("bounded", "free"):
            assert artifacts(tmp_path / name / phase) == artifacts(tmp_path / "x" / phase)
            assert logged(tmp_path / name / phase) == logged(tmp_path / "x" / phase)
    tokens = [values["tokens"] for phase in ("bounded", "free") for _, values in logged(tmp_path / "x" / phase)]
    assert tokens == [step * 8 * 16 for step in range(1, 9)]
