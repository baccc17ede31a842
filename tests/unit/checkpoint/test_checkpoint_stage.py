"""Importing checkpoints of other makers, in the frame of a stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from implicit_llm.checkpoint import stage
from implicit_llm.checkpoint.source import CheckpointError
from implicit_llm.checkpoint.stage import CheckpointLayoutError
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fetched_files import Fetched, FetchedFilesError, HubFiles
from implicit_llm_contracts.runs.manifest import Manifest, sha256_of
from implicit_llm_jobs.stage import run_stage
from tests.unit.checkpoint.foreign import VOCAB, save_foreign, save_original_mamba2
from tests.unit.evaluation.finished_runs import request

PARITY = Path(__file__).parents[2] / "data" / "parity"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def import_checkpoint(tmp_path: Path, config: dict[str, Any], downloads: Path | None = None) -> Path:
    """Run the stage; returns the run directory."""
    asked = request(tmp_path / "run", "checkpoint", "peer", config, {})
    asked.runtime["downloads"] = downloads or tmp_path / "downloads"
    run_stage(asked, stage.run)
    return tmp_path / "run"


def imported(run_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(next(run_dir.glob("work/*/model")), local_files_only=True).eval()


def logits_differ_by(model: Any, other: Any, vocab_size: int = VOCAB) -> float:
    input_ids = torch.arange(30)[None] % vocab_size
    with torch.no_grad():
        return float((model(input_ids=input_ids).logits - other(input_ids=input_ids).logits).abs().max())


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mamba2"])
def test_a_checkpoint_of_transformers_is_copied_as_it_is(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    model = save_foreign(kind, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_code.py").write_text("raise SystemExit")
    run_dir = import_checkpoint(tmp_path, {"path": str(source)})
    manifest = Manifest.read(run_dir / "manifest.json")
    digests = {record.path.rpartition("/")[2]: record.sha256 for record in manifest.files}
    del digests["README.md"]  # the card, which is made here
    names = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"}
    assert digests == {name: sha256_of(source / name) for name in names if (source / name).is_file()}
    assert manifest.summary["layout"] == "transformers"
    assert manifest.summary["source"]["path"] == str(source)
    assert manifest.summary["source"]["sha256"]["model.safetensors"] == digests["model.safetensors"]
    assert logits_differ_by(imported(run_dir), model) == 0


def test_shards_come_with_their_index(tmp_path: Path) -> None:
    model = save_foreign("gpt_neox", tmp_path / "source", max_shard_size="10KB")
    run_dir = import_checkpoint(tmp_path, {"path": str(tmp_path / "source")})
    assert len(list(run_dir.glob("work/*/model/model-*.safetensors"))) > 1
    assert logits_differ_by(imported(run_dir), model) == 0


@pytest.mark.parametrize("is_pickle", [False, True])
def test_the_original_mamba2_becomes_one_of_ours(tmp_path: Path, is_pickle: bool) -> None:
    source = tmp_path / "source"
    model = save_original_mamba2(source, is_pickle=is_pickle)
    config: dict[str, Any] = {"path": str(source)}
    if is_pickle:
        digest = sha256_of(source / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=f"is a pickle; .*pytorch_model.bin: {digest}"):
            import_checkpoint(tmp_path, config)
        config["sha256"] = {"pytorch_model.bin": digest}
    run_dir = import_checkpoint(tmp_path, config)
    found = imported(run_dir)
    assert found.config.model_type == "implicit_mamba2"
    assert found.solver is None
    assert logits_differ_by(found, model) < 1e-4  # both in fp32
    assert not list(run_dir.rglob("*.bin"))


def test_the_published_layout_becomes_ours_with_the_same_logits(tmp_path: Path) -> None:
    source = PARITY / "mamba2-implicit"
    run_dir = import_checkpoint(tmp_path, {"path": str(source)})
    found, direct = imported(run_dir), AutoModelForCausalLM.from_pretrained(source)
    assert Manifest.read(run_dir / "manifest.json").summary["layout"] == "published"
    assert found.solver == direct.solver
    assert found.solver.eval_stop == "batch"
    assert logits_differ_by(found, direct.eval(), 16) == 0


def test_equal_checkpoints_give_equal_manifests(tmp_path: Path) -> None:
    save_original_mamba2(tmp_path / "source")
    texts = []
    for name in ("a", "b"):
        run_dir = import_checkpoint(tmp_path / name, {"path": str(tmp_path / "source")})
        texts.append((run_dir / "manifest.json").read_bytes())
    assert texts[0] == texts[1]


def test_a_path_may_be_relative_to_the_folder_of_fetched_files(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "downloads" / "neox")
    run_dir = import_checkpoint(tmp_path, {"path": "neox"})
    assert Manifest.read(run_dir / "manifest.json").summary["source"]["path"] == "neox"


def fetch(downloads: Path, revision: str | None) -> Path:
    """A model of the hub, as prefetch leaves it."""
    folder = downloads / "models" / "owner" / "neox" / (revision or "main")
    save_foreign("gpt_neox", folder)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    Fetched(revision, COMMIT, sizes).write(HubFiles("model", "owner/neox", revision).record(downloads))
    return folder


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_fetched_model_of_the_hub_is_recorded_with_its_commit(tmp_path: Path, revision: str | None) -> None:
    fetch(tmp_path / "downloads", revision)
    run_dir = import_checkpoint(tmp_path, {"hub": "owner/neox", "revision": revision})
    source = Manifest.read(run_dir / "manifest.json").summary["source"]
    assert (source["hub"], source["revision"], source["commit"]) == ("owner/neox", revision, COMMIT)


def test_what_was_not_fetched_is_named_with_the_command(tmp_path: Path) -> None:
    config = {"hub": "owner/neox", "revision": COMMIT}
    with pytest.raises(FetchedFilesError, match="owner/neox has not been fetched; type `implicit-llm prefetch"):
        import_checkpoint(tmp_path, config)
    folder = fetch(tmp_path / "downloads", COMMIT)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FetchedFilesError, match=r"model\.safetensors: is missing"):
        import_checkpoint(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "either path"),
        ({"path": "a", "hub": "b"}, "not both"),
        ({"path": "a", "revison": "b"}, "did you mean 'revision'"),
    ],
)
def test_a_source_is_one_of_two(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        import_checkpoint(tmp_path, config)


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_half_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"] = torch.zeros(16, 16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_model_type(folder: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_weight, "lack gpt_neox.layers.1.mlp.dense_h_to_4h.weight, .* drawn at random"),
        (with_half_a_weight, "lack gpt_neox.layers.0.mlp.dense_h_to_4h.weight, as config.json wants it"),
        (lambda folder: with_model_type(folder, "surprise"), "'surprise' is none of transformers"),
        (lambda folder: with_model_type(folder, "vit"), "no causal language model"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), "no causal language model"),
        (as_pickle, "is a pickle"),
        (shutil.rmtree, "is no directory"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused_in_one_line(tmp_path: Path, damage: Any, named: str) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises((CheckpointError, CheckpointLayoutError), match=named) as caught:
        import_checkpoint(tmp_path, {"path": str(tmp_path / "source")})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("run/work/*/model"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", "garbage"),
        ("config.json", '{"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}}'),  # without vocab_size
    ],
)
def test_a_damaged_checkpoint_of_the_original_mamba2_is_refused_in_one_line(
    tmp_path: Path, file: str, content: str
) -> None:
    source = tmp_path / "source"
    save_original_mamba2(source)
    (source / file).write_text(content)
    with pytest.raises(CheckpointLayoutError, match="source: is no causal language model that can be loaded") as caught:
        import_checkpoint(tmp_path, {"path": str(source)})
    assert "\n" not in str(caught.value)


def test_a_pickle_of_transformers_is_refused_even_when_vouched_for(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    as_pickle(tmp_path / "source")
    digest = sha256_of(tmp_path / "source" / "pytorch_model.bin")
    with pytest.raises(CheckpointLayoutError, match="save the model with safetensors"):
        import_checkpoint(tmp_path, {"path": str(tmp_path / "source"), "sha256": {"pytorch_model.bin": digest}})


@pytest.mark.parametrize("layout", ["original", "published"])
def test_a_pickle_of_more_than_tensors_is_refused_in_one_line(tmp_path: Path, layout: str) -> None:
    source = tmp_path / "source"
    save_original_mamba2(source)
    if layout == "published":
        shutil.copyfile(PARITY / "mamba2-implicit" / "config.json", source / "config.json")
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    torch.save({"weight": Path("anything")}, path)
    config = {"path": str(source), "sha256": {"pytorch_model.bin": sha256_of(path)}}
    with pytest.raises(CheckpointLayoutError, match=r"_model\.bin: cannot be read with weights_only: it") as caught:
        import_checkpoint(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_of_a_whole_file_and_shards_the_one_that_is_read_is_recorded(tmp_path: Path) -> None:
    source = shutil.copytree(PARITY / "mamba2-implicit", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file({name: value * 0 for name, value in weights.items()}, source / "shard.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "shard.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    run_dir = import_checkpoint(tmp_path, {"path": str(source)})
    recorded = Manifest.read(run_dir / "manifest.json").summary["source"]["sha256"]
    assert recorded == {name: sha256_of(source / name) for name in ("config.json", "model.safetensors")}
    assert all(parameter.abs().sum() > 0 for parameter in imported(run_dir).parameters() if parameter.ndim == 2)


def test_content_other_than_the_config_names_is_refused(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    wanted = {"model.safetensors": "0" * 64}
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has sha256 .*, expected 0000"):
        import_checkpoint(tmp_path, {"path": str(tmp_path / "source"), "sha256": wanted})
