"""A model that others saved is loaded whole, or refused in one line; its folder runs no code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading.foreign import load_foreign
from tests.unit.checkpoint.foreign import save_foreign

PARITY = Path(__file__).parents[2] / "data" / "parity"
WEIGHT = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"


def test_a_model_is_loaded_in_fp32_however_it_was_saved(tmp_path: Path) -> None:
    save_foreign("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    shutil.copytree(PARITY / "mamba2-implicit", tmp_path / "published")
    config = tmp_path / "published" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    for folder in (tmp_path, tmp_path / "published"):
        assert {parameter.dtype for parameter in load_foreign(folder).parameters()} == {torch.float32}


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_half_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors") | {WEIGHT: torch.zeros(16, 16)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_weight, f"lack {WEIGHT}, .* drawn at random"),
        (with_half_a_weight, f"lack {WEIGHT}, .* drawn at random"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), "no causal language model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no causal language model"),
        (lambda folder: (folder / "config.json").write_text("{"), "no causal language model"),
    ],
)
def test_what_is_no_whole_model_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    save_foreign("gpt_neox", tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelConfigError, match=named) as caught:
        load_foreign(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_beside_a_model_is_not_run_whatever_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    save_foreign("gpt_neox", tmp_path)
    path = tmp_path / "config.json"
    code = {"auto_map": {"AutoModelForCausalLM": "code.Model"}, "model_type": "vit"}  # no language model of its own
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n")
    with pytest.raises(ModelConfigError, match="no causal language model"):
        load_foreign(tmp_path)
    assert not (tmp_path / "made").exists()
