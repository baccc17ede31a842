"""TRL's trainers take models of both families as they are: supervised, on preferences, and by rewards of samples."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # what these packages say to one another
]
BOTH = pytest.mark.parametrize("family", ["mamba2", "llama3"])
STEPS = 10


@pytest.fixture
def trl() -> Any:
    """The package, imported when a test runs: it takes seconds."""
    return importlib.import_module("trl")


def dataset(**columns: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder.parent / "out"), "max_steps": STEPS, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 5,
    }  # fmt: skip


def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def assert_trained(trainer: Any) -> None:
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    assert trainer.train().global_step == STEPS
    changed = [name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])]
    assert len(changed) == len(before)
    assert all(value.isfinite().all() for value in trainer.model.parameters())


@BOTH
def test_supervised_fine_tuning(trl: Any, folder: Path) -> None:
    model, tokenizer = loaded(folder)
    data = dataset(text=["w3 w4 w5 w6 w7", "w8 w9 w10"] * 4)
    arguments = trl.SFTConfig(**settings(folder), max_length=16)
    assert_trained(trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer))


@BOTH
def test_preferences_without_a_reference_model(trl: Any, folder: Path) -> None:
    model, tokenizer = loaded(folder)
    data = dataset(prompt=["w3 w4"] * 8, chosen=[" w5 w6"] * 8, rejected=[" w7"] * 8)
    arguments = trl.DPOConfig(**settings(folder), max_length=16)
    assert_trained(trl.DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer))


@BOTH
def test_rewards_of_samples_that_the_model_generates_in_train_mode(trl: Any, folder: Path) -> None:
    model, tokenizer = loaded(folder)
    data = dataset(prompt=["w3 w4", "w5 w6 w7"] * 4)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    arguments = trl.GRPOConfig(**settings(folder), num_generations=2, max_completion_length=4, learning_rate=1e-3)
    assert_trained(
        trl.GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer)
    )
