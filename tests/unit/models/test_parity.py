"""Four small models in the published layout give the numbers that the published code gave.

tests/data/parity/README.md says how the numbers were made; they agree to about 1e-3 in logits and 1 % in gradients.
"""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import implicit_llm  # noqa: F401  (registers the models)
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.published import clean_name

PARITY = Path(__file__).parents[2] / "data" / "parity"
EXPLICIT = ["mamba2-explicit", "llama3-explicit"]
IMPLICIT = ["mamba2-implicit", "llama3-implicit"]


class Fixture:
    def __init__(self, name: str) -> None:
        self.directory = PARITY / name
        self.tensors = load_file(self.directory / "expected.safetensors")
        self.numbers = json.loads((self.directory / "expected.json").read_text())
        self.model = AutoModelForCausalLM.from_pretrained(self.directory)

    def assert_gradients(self, tag: str) -> None:
        ours = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        prefix = f"{tag}_grad."
        theirs = {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}
        assert len(theirs) > 5
        for name, expected in theirs.items():
            got = ours[clean_name(name, self.model.config.model_type)]
            assert (got - expected).norm() <= 0.01 * expected.norm() + 1e-6, name


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_model_gives_the_published_logits_loss_and_gradients(name: str) -> None:
    fixture = Fixture(name)
    with torch.no_grad():
        torch.testing.assert_close(
            fixture.model.eval()(fixture.tensors["input_ids"]).logits,
            fixture.tensors["eval_simultaneous_logits"],
            atol=1e-4,
            rtol=1e-4,
        )
    output = fixture.model.train()(fixture.tensors["input_ids"], labels=fixture.tensors["labels"], aligned=True)
    torch.testing.assert_close(output.logits, fixture.tensors["train_logits"], atol=1e-4, rtol=1e-4)
    assert output.loss.item() == pytest.approx(fixture.numbers["train_loss"], rel=1e-4)
    output.loss.backward()
    fixture.assert_gradients("train")


@pytest.mark.parametrize("name", IMPLICIT)
def test_both_evaluations_give_the_published_logits_and_iterations(name: str) -> None:
    fixture = Fixture(name)
    numbers = fixture.numbers
    output = fixture.model.eval()(fixture.tensors["input_ids"])
    torch.testing.assert_close(output.logits, fixture.tensors["eval_simultaneous_logits"], atol=1e-3, rtol=1e-3)
    assert output.solver_stats.num_iter.tolist() == [numbers["eval_simultaneous_steps"]] * 3
    assert output.solver_stats.residual[0].item() == pytest.approx(numbers["eval_simultaneous_rel_diff"], rel=0.02)
    output = fixture.model(fixture.tensors["input_ids"], eval_mode="sequential")
    torch.testing.assert_close(output.logits, fixture.tensors["eval_sequential_logits"], atol=1e-3, rtol=1e-3)
    assert output.solver_stats.num_iter[0].item() == pytest.approx(numbers["eval_sequential_mean_steps"], abs=0.05)


@pytest.mark.parametrize("name", IMPLICIT)
@pytest.mark.parametrize(("tag", "counted"), [("train_free", "num_iter"), ("train_unrolled", "num_closing")])
def test_a_training_pass_gives_the_published_logits_loss_gradients_and_iterations(
    name: str, tag: str, counted: str
) -> None:
    fixture = Fixture(name)
    if tag == "train_unrolled":
        num_unroll = fixture.numbers["unrolled_iterations"]
        fixture.model.solver = replace(fixture.model.solver, mode="unrolled", num_unroll=num_unroll)
    output = fixture.model.train()(fixture.tensors["input_ids"], labels=fixture.tensors["labels"], aligned=True)
    torch.testing.assert_close(output.logits, fixture.tensors[f"{tag}_logits"], atol=1e-3, rtol=1e-3)
    assert output.loss.item() == pytest.approx(fixture.numbers[f"{tag}_loss"], rel=1e-4)
    assert torch.as_tensor(getattr(output.solver_stats, counted)).max().item() == fixture.numbers[f"{tag}_steps"]
    output.loss.backward()
    fixture.assert_gradients(tag)


@pytest.mark.parametrize("name", EXPLICIT + IMPLICIT)
def test_a_published_model_is_saved_in_the_clean_layout_and_read_back_exactly(name: str, tmp_path: Path) -> None:
    fixture = Fixture(name)
    fixture.model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"backbone_config", "deq_params"} & set(saved)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.solver == fixture.model.solver
    torch.testing.assert_close(again.state_dict(), fixture.model.state_dict(), rtol=0, atol=0)
    backbone = AutoModel.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(backbone, fixture.model.base.state_dict(), rtol=0, atol=0)


INDEX = "pytorch_model.bin.index.json"


def write_config(
    folder: Path, name: str = IMPLICIT[0], weight_map: dict[str, str] | None = None, index: str = INDEX
) -> None:
    """The configuration of a published model, and an index of shards if there is a map."""
    shutil.copy(PARITY / name / "config.json", folder)
    if weight_map is not None:
        (folder / index).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", IMPLICIT)
def test_pytorch_bin_and_shards_are_read_like_safetensors(name: str, tmp_path: Path) -> None:
    fixture = Fixture(name)
    weights = load_file(fixture.directory / "model.safetensors")
    weight_map = {key: f"pytorch_model-{number % 2}.bin" for number, key in enumerate(sorted(weights))}
    for file in set(weight_map.values()):
        torch.save({key: weight for key, weight in weights.items() if weight_map[key] == file}, tmp_path / file)
    write_config(tmp_path, name, weight_map)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fixture.model.parameters(), strict=True))


@dataclass
class Code:
    """What a pickle of it does: make a folder."""

    folder: Path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "shard.bin"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, weight_map={"weight": name} if name == "shard.bin" else None)
    torch.save({"weight": Code(tmp_path / "made")}, tmp_path / name)
    with pytest.raises(ModelConfigError, match=rf"{name}: cannot be read .*more than tensors by name; .*safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "made").exists()
    torch.load(tmp_path / name, weights_only=False)
    assert (tmp_path / "made").exists()  # it would have


@pytest.mark.parametrize("index", [INDEX, "model.safetensors.index.json"])
def test_who_asks_for_safetensors_gets_no_pickle(tmp_path: Path, index: str) -> None:
    weights = load_file(PARITY / IMPLICIT[0] / "model.safetensors")
    torch.save(weights, tmp_path / "shard.bin")
    write_config(tmp_path, weight_map=dict.fromkeys(weights, "shard.bin"), index=index)
    with pytest.raises((FileNotFoundError, SafetensorError)):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)


def test_an_index_of_shards_leads_to_no_other_folder(tmp_path: Path) -> None:
    write_config(tmp_path, weight_map={"model.embedding": "../elsewhere/pytorch_model.bin"})
    with pytest.raises(ModelConfigError, match=r"index\.json: names '\.\./elsewhere/pytorch_model\.bin'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
