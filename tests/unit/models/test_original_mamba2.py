"""Checkpoints in the layout of the original Mamba2 release, against transformers' Mamba2 with the same weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading.original_mamba2 import UntrustedCheckpoint, is_original_mamba2, load_original_mamba2

VOCAB, PADDED = 21, 24
CONFIG: dict[str, Any] = {
    "d_model": 16,
    "d_intermediate": 0,
    "n_layer": 3,
    "vocab_size": VOCAB,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}


def transformers_model(*, tied: bool = True) -> Mamba2ForCausalLM:
    """A random model whose layers matter: large weights, and none that initialisation left at a constant."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 8, "state_size": 8}
    config = Mamba2Config(
        **sizes, vocab_size=PADDED, n_groups=1, conv_kernel=4, tie_word_embeddings=tied, chunk_size=16
    )
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.uniform_(-1.0, 1.5)
            elif "norm" in name or name.endswith(".D"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return model


def original_weights(model: Mamba2ForCausalLM) -> dict[str, torch.Tensor]:
    """Under the names of the original release."""
    names = {name: name.replace("backbone.embeddings.", "backbone.embedding.") for name in model.state_dict()}
    return {names[name]: value.clone() for name, value in model.state_dict().items()}


def write(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_in_fp64(tmp_path: Path, tied: bool) -> None:
    reference = transformers_model(tied=tied)
    ours = load_original_mamba2(write(tmp_path / "m", original_weights(reference), tie_embeddings=tied))
    input_ids = torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = reference.double()(input_ids).logits.double(), ours.double()(input_ids).logits
    assert expected.std() > 0.5
    # transformers computes its norms and returns its logits in fp32 whatever the dtype.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert ours.solver is None


def test_a_pickle_is_read_only_for_who_vouches_for_it(tmp_path: Path) -> None:
    reference = transformers_model()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "pytorch_model.bin"
    torch.save(original_weights(reference), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UntrustedCheckpoint, match=digest):
        load_original_mamba2(tmp_path)
    with pytest.raises(ModelConfigError, match="expected sha256 0000"):
        load_original_mamba2(tmp_path, sha256="0" * 64)
    input_ids = torch.arange(20)[None] % VOCAB
    with torch.no_grad():
        expected, found = reference(input_ids).logits, load_original_mamba2(tmp_path, sha256=digest)(input_ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # both in fp32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ssm_cfg": {}}, "'Mamba1' is not Mamba2"),
        ({"ssm_cfg": {"layer": "Mamba2", "ngroups": 2}}, "ssm_cfg.ngroups: 2"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "ssm_cfg.norm_before_gate"),
        ({"ssm_cfg": {"layer": "Mamba2", "surprise": 1}}, "ssm_cfg.surprise"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, 0.1]}}, "ssm_cfg.dt_limit"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx: \[1\]"),
        ({"n_layer": 4}, r"layers\.3\..*do not belong together"),
        ({"d_model": 32}, "wants shape"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = write(tmp_path / "m", original_weights(transformers_model()), **changes)
    with pytest.raises(ModelConfigError, match=named):
        load_original_mamba2(folder)


def test_only_the_original_layout_is_taken_for_it() -> None:
    assert is_original_mamba2(CONFIG)
    assert not is_original_mamba2({"model_type": "mamba2", **CONFIG})
    assert not is_original_mamba2({"backbone_config": {}, "model_type": "implicit_mamba2"})
