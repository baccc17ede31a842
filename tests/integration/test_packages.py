"""What users bring: TRL's trainers, stock lm-eval, and transformers where the package is not imported or not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import implicit_llm
from tests.pages import ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # what these packages say to one another
]
STEPS = 10
SMALL = {
    "mamba2": {"head_dim": 16, "state_size": 16},
    "llama3": {"num_attention_heads": 2, "intermediate_size": 48},
}


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    """A saved model of 32 words with its tokenizer."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")
    config = implicit_llm.load_config(
        f"{family}-130m-implicit", hidden_size=32, num_hidden_layers=1, vocab_size=32,
        solver={"max_iter": 4, "tol": 0.01}, pad_token_id=0, eos_token_id=1, bos_token_id=2, **SMALL[family],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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


@pytest.mark.parametrize("family", ["mamba2", "llama3"])
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_takes_a_model_as_it_is(folder: Path, name: str) -> None:
    import trl  # takes seconds
    from datasets import Dataset

    options, columns, others = CASES[name]
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(folder.parent / "out"), max_steps=STEPS, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_steps=5, **options,
    )  # fmt: skip
    others = others | {"processing_class": PreTrainedTokenizerFast.from_pretrained(folder)}
    model = AutoModelForCausalLM.from_pretrained(folder)
    data = Dataset.from_dict(columns)
    trainer = getattr(trl, f"{name}Trainer")(model, args=arguments, train_dataset=data, **others)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    assert trainer.train().global_step == STEPS
    for name, value in trainer.model.named_parameters():
        assert (value.isfinite().all(), torch.equal(value, before[name])) == (True, False), name


@pytest.mark.parametrize("family", ["mamba2"])
@pytest.mark.parametrize("options", [{"packing": True, "max_length": 16}, {"padding_free": True, "max_length": None}])
def test_packed_documents_of_trl_are_refused_by_name(folder: Path, options: dict[str, Any]) -> None:
    import trl
    from datasets import Dataset

    arguments = trl.SFTConfig(
        output_dir=str(folder.parent / "out"), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model, data = AutoModelForCausalLM.from_pretrained(folder), Dataset.from_dict(CASES["SFT"][1])
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    with pytest.raises(ValueError, match="packed documents would read one another; pad them"):
        trainer.train()


LOAD = """
import sys
from transformers import AutoModelForCausalLM
class NotInstalled:
    def find_spec(self, name, *_):
        if name == "implicit_llm":
            raise ModuleNotFoundError("No module named 'implicit_llm'")
sys.meta_path.insert(0, NotInstalled())
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(" ".join(str(error).split()))
del sys.meta_path[0]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, model.solver.tol)
model.save_pretrained(sys.argv[2])
"""


def run(tmp_path: Path, *command: str) -> str:
    """Its output; without a network, and with a cache of its own for the code that transformers copies."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", ["llama3"])
def test_a_saved_model_loads_without_the_import_and_names_the_package_that_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    output = run(tmp_path, sys.executable, "-c", LOAD, str(folder), str(tmp_path / "again"))
    missing, loaded = output.splitlines()
    assert "pip install implicit_llm" in missing
    assert loaded == "implicit_llm.models.llama3.model 0.01"
    for name in ("config.json", "modeling_implicit.py", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("family", ["mamba2"])
def test_stock_lm_eval_scores_a_saved_model(folder: Path, tmp_path: Path) -> None:
    program, tasks = Path(sys.executable).with_name("lm_eval"), ROOT / "workflow" / "config" / "lm_eval" / "local"
    run(
        tmp_path, str(program), "--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True",
        "--tasks", "local_cloze", "--include_path", str(tasks), "--limit", "4", "--device", "cpu",
        "--output_path", str(tmp_path / "scores"),
    )  # fmt: skip
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(scores.read_text(encoding="utf-8"))["results"]["local_cloze"]["acc,none"] >= 0
