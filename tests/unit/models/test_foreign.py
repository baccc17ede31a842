"""A model that others saved is loaded whole, or refused in one line; its folder runs no code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading.foreign import load_foreign
from tests.unit.checkpoint.foreign import save_foreign

PARITY = Path(__file__).parents[2] / "data" / "parity"


def test_a_model_is_loaded_in_fp32_however_it_was_saved(tmp_path: Path) -> None:
    save_foreign("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    shutil.copytree(PARITY / "mamba2-implicit", tmp_path / "published")
    config = tmp_path / "published" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    for folder in (tmp_path, tmp_path / "published"):
        assert {parameter.dtype for parameter in load_foreign(folder).parameters()} == {torch.float32}


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
