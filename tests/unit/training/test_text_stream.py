"""Language models on a real stream of tokens, as the data stages make it from text files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.faults import FaultInjected
from tests.unit.data.text_samples import VOCAB_SIZE, Project, write_corpus
from tests.unit.training.small_runs import IMPLICIT, Inject, artifacts, logged, train, train_config


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


@pytest.mark.parametrize("micro_step", [1, 6, 7, 16])
def test_a_crash_in_any_micro_step_changes_nothing(
    tmp_path: Path, stream: Path, inject: Inject, whole: Path, micro_step: int
) -> None:
    run_dir = tmp_path / "a" / "only"
    with inject(f"train.micro_step:raise@{micro_step}"), pytest.raises(FaultInjected):
        train(run_dir, config_of(), stream, micro_batch_size=4, save_steps=2)
    train(run_dir, config_of(), stream, micro_batch_size=4)
    assert artifacts(run_dir) == artifacts(whole)
    assert logged(run_dir) == logged(whole)
