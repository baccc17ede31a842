from pathlib import Path
from typing import Any

import pytest

from implicit_llm.training.metrics import StepMetrics
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_jobs.tracking.mlflow_bridge import SECTIONS, TRAINING, mlflow_key
from implicit_llm_jobs.tracking.tracked_run import TrackedInput, TrackedRun, model_labels

LLAMA = {"model_type": "implicit_llama3", "is_implicit": False, "num_hidden_layers": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("stage", "name", "config", "summary", "expected"),
    [
        (
            "train",
            "mamba2-1.3b-implicit-s1/free-80",
            {"task": "language_model", "seed": 1, "model": {"model_type": "implicit_mamba2", "is_implicit": True}},
            {},
            {"task": "language_model", "family": "mamba2", "size": "1.3b", "run": "mamba2-1.3b-implicit", "seed": "1"}
            | {"phase": "free-80", "is_implicit": "true"},
        ),
        (
            "train",
            "text-s0/explicit",
            {"task": "language_model", "seed": 0, "model": LLAMA},
            {},
            {"task": "language_model", "family": "llama3", "size": "12x768", "run": "text", "phase": "explicit"}
            | {"seed": "0", "is_implicit": "false"},
        ),
        (
            "checkpoint",
            "mamba2-130m-300b",
            {"hub": "state-spaces/mamba2-130m"},
            {"model_type": "mamba2"},
            {"family": "mamba2", "size": "130m", "run": "mamba2-130m-300b", "phase": "checkpoint"}
            | {"is_implicit": "false"},
        ),
        (
            "train",
            "mine-s0/explicit",
            {"task": "catbabi", "model": {"pretrained": "gpt2"}, "seed": 0},
            {},
            {"task": "catbabi", "run": "mine", "phase": "explicit", "seed": "0"},
        ),
    ],
)
def test_a_run_is_labelled_by_what_its_name_and_config_tell(
    stage: str, name: str, config: dict[str, Any], summary: dict[str, Any], expected: dict[str, str]
) -> None:
    assert model_labels(stage, name, config, summary) == expected


def test_an_evaluation_has_the_labels_of_its_model_and_its_own_kind(tmp_path: Path) -> None:
    config = {"task": "language_model", "model": {"model_type": "implicit_llama3", "is_implicit": True}, "seed": 0}
    trained = Identity("train", "llama3-130m-s0/free", config, "c0de", {})
    given = TrackedInput(tmp_path, trained.fingerprint)
    Manifest.of(trained, (), {}).write(given.work / "manifest.json")
    found = TrackedRun(tmp_path, tmp_path, "evaluate", "e", "0", {"kind": "perplexity"}, {"model": given}).labels()
    assert found == model_labels("train", trained.name, config, {}) | {"task": "perplexity"}
    assert found["family"] == "llama3"


def test_data_and_reports_are_labelled_by_their_kind(tmp_path: Path) -> None:
    def labels(stage: str, config: dict[str, Any]) -> dict[str, str]:
        return TrackedRun(tmp_path, tmp_path, stage, "n", "0", config).labels()

    assert labels("data", {"kind": "tokenizer"}) == {"task": "tokenizer"}
    assert labels("report", {}) == {}


@pytest.mark.parametrize("task", list(TASKS))
def test_every_metric_of_training_is_in_the_list(task: str) -> None:
    assert set(StepMetrics(task).columns) <= {key for section in TRAINING.values() for key in section}


@pytest.mark.parametrize(
    ("stage", "key", "expected"),
    [
        ("train", "loss", "loss"),
        ("train", "residual", "solver/residual"),
        ("train", "mfu", "cost/mfu"),
        ("train", "something_new", "something_new"),
        ("train", "summary/loss", "summary/loss"),
        ("evaluate", "residual.trained", "evaluation/residual.trained"),
        ("evaluate", "acc.task.blockwise@eval_tol=0.2", "evaluation/acc.task.blockwise.eval_tol-0.2"),
        ("data", "tokens", "data/tokens"),
        ("report", "pages", "pages"),
    ],
)
def test_keys_stand_in_the_section_of_their_stage(stage: str, key: str, expected: str) -> None:
    assert mlflow_key(stage, key) == expected
    assert mlflow_key(stage, expected) == expected or stage in SECTIONS
