"""TRL's trainers take models of both families as they are: supervised, on preferences, and by rewards of samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # what these packages say to one another
]
STEPS = 10


WORDS = {"prompt": ["w3 w4", "w5 w6 w7"] * 4}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


CASES = {  # options of the configuration, data, options of the trainer
    "SFT": ({"max_length": 16}, {"text": ["w3 w4 w5 w6 w7", "w8 w9 w10"] * 4}, {}),
    "DPO": ({"max_length": 16}, WORDS | {"chosen": [" w5 w6"] * 8, "rejected": [" w7"] * 8}, {}),
    "GRPO": (
        {"num_generations": 2, "max_completion_length": 4, "learning_rate": 1e-3}, WORDS, {"reward_funcs": reward}
    ),
}  # fmt: skip


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder.parent / "out"), "max_steps": STEPS, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 5,
    }  # fmt: skip


def assert_trained(trainer: Any) -> None:
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    assert trainer.train().global_step == STEPS
    changed = [name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])]
    assert len(changed) == len(before)
    assert all(value.isfinite().all() for value in trainer.model.parameters())


@pytest.mark.parametrize("family", ["mamba2", "llama3"])
@pytest.mark.parametrize("trainer", CASES)
def test_a_trainer_takes_a_model_as_it_is(folder: Path, trainer: str) -> None:
    import trl  # takes seconds
    from datasets import Dataset

    options, columns, others = CASES[trainer]
    arguments = getattr(trl, f"{trainer}Config")(**settings(folder), **options)
    model = AutoModelForCausalLM.from_pretrained(folder)
    others = others | {"processing_class": PreTrainedTokenizerFast.from_pretrained(folder)}
    data = Dataset.from_dict(columns)
    assert_trained(getattr(trl, f"{trainer}Trainer")(model, args=arguments, train_dataset=data, **others))
