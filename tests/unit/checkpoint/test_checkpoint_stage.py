"""Importing checkpoints of other makers, in the frame of a stage, and evaluating them by hand."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from implicit_llm.checkpoint.stage import CheckpointError
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.fetched_files import Fetched, FetchedFilesError, HubFiles
from implicit_llm_contracts.runs.manifest import Manifest, sha256_of
from tests.refusals import refused
from tests.unit.checkpoint.foreign import VOCAB, import_checkpoint, save_foreign, save_original_mamba2
from tests.unit.evaluation.finished_runs import train_nothing, word_problems
from tests.unit.workflow.experiments import run

PARITY = Path(__file__).parents[2] / "data" / "parity"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def source_of(run_dir: Path) -> dict[str, Any]:
    return Manifest.read(run_dir / "manifest.json").summary["source"]


def imported(run_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(next(run_dir.glob("work/*/model")), local_files_only=True).eval()


def logits_differ_by(model: Any, other: Any, vocab_size: int = VOCAB) -> float:
    input_ids = torch.arange(30)[None] % vocab_size
    with torch.no_grad():
        return float((model(input_ids=input_ids).logits - other(input_ids=input_ids).logits).abs().max())


@pytest.mark.parametrize(("kind", "how"), [("gpt_neox", {"max_shard_size": "10KB"}), ("llama", {}), ("mamba2", {})])
def test_a_checkpoint_of_transformers_is_copied_as_it_is(tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    """Also one in shards, with their index, and by a path relative to the folder of fetched files."""
    source = tmp_path / "downloads" / "mine"
    model = save_foreign(kind, source, **how)
    names = {path.name for path in source.iterdir()}
    assert len(list(source.glob("*.safetensors"))) > len(how)
    (source / "modeling_code.py").write_text("raise SystemExit")
    (source / "tokenizer.json").write_text("{}")
    run_dir = import_checkpoint(tmp_path, path="mine", sha256={"tokenizer.json": sha256_of(source / "tokenizer.json")})
    manifest = Manifest.read(run_dir / "manifest.json")
    digests = {record.path.rpartition("/")[2]: record.sha256 for record in manifest.files}
    del digests["README.md"]  # the card, which is made here
    assert digests == {name: sha256_of(source / name) for name in names | {"tokenizer.json"}}
    assert manifest.summary["layout"] == "transformers"
    assert manifest.summary["num_parameters"] == model.num_parameters()
    assert manifest.summary["source"]["path"] == "mine"
    weights = {name: digest for name, digest in digests.items() if name.startswith("model")}
    assert weights.items() <= manifest.summary["source"]["sha256"].items()
    assert logits_differ_by(imported(run_dir), model) == 0


@pytest.mark.parametrize("is_pickle", [False, True])
def test_the_original_mamba2_becomes_one_of_ours(tmp_path: Path, is_pickle: bool) -> None:
    source, vouched = tmp_path / "source", {}
    model = save_original_mamba2(source, is_pickle=is_pickle)
    if is_pickle:
        digest = sha256_of(source / "pytorch_model.bin")
        with refused(f"is a pickle; .*pytorch_model.bin: {digest}", CheckpointError):
            import_checkpoint(tmp_path)
        vouched = {"sha256": {"pytorch_model.bin": digest}}
    run_dir = import_checkpoint(tmp_path, **vouched)
    found = imported(run_dir)
    assert (found.config.model_type, found.solver) == ("implicit_mamba2", None)
    assert logits_differ_by(found, model) < 1e-4  # both in fp32
    assert not list(run_dir.rglob("*.bin"))


def test_the_published_layout_becomes_ours_with_the_same_logits(tmp_path: Path) -> None:
    source = PARITY / "mamba2-implicit"
    run_dir = import_checkpoint(tmp_path, path=str(source))
    found, direct = imported(run_dir), AutoModelForCausalLM.from_pretrained(source)
    assert Manifest.read(run_dir / "manifest.json").summary["layout"] == "published"
    assert found.solver == direct.solver
    assert found.solver.eval_stop == "batch"
    assert logits_differ_by(found, direct.eval(), 16) == 0


def test_equal_checkpoints_give_equal_manifests(tmp_path: Path) -> None:
    save_original_mamba2(tmp_path / "source")
    for name in ("a", "b"):
        import_checkpoint(tmp_path / name, path=str(tmp_path / "source"))
    assert (tmp_path / "a/run/manifest.json").read_bytes() == (tmp_path / "b/run/manifest.json").read_bytes()


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
    source = source_of(import_checkpoint(tmp_path, hub="owner/neox", revision=revision))
    assert (source["hub"], source["revision"], source["commit"]) == ("owner/neox", revision, COMMIT)


def test_what_was_not_fetched_is_named_with_the_command(tmp_path: Path) -> None:
    with refused("owner/neox has not been fetched; type `implicit-llm prefetch", FetchedFilesError):
        import_checkpoint(tmp_path, hub="owner/neox", revision=COMMIT)
    (fetch(tmp_path / "downloads", COMMIT) / "model.safetensors").unlink()
    with refused(r"model\.safetensors: expected \d+ bytes, found no file", FetchedFilesError):
        import_checkpoint(tmp_path, hub="owner/neox", revision=COMMIT)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"path": None}, "either path"),
        ({"path": "a", "hub": "b"}, "not both"),
        ({"path": "a", "revison": "b"}, "did you mean 'revision'"),
    ],
)
def test_a_source_is_one_of_two(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with refused(named, ConfigError):
        import_checkpoint(tmp_path, **config)


def with_weight(folder: Path, name: str, weight: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights | ({} if weight is None else {name: weight}), folder / "model.safetensors", {"format": "pt"})


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_one_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


MORE = {  # weights of public checkpoints that their class does not load, and settings in their config.json
    "buffer": ("gpt_neox.layers.0.attention.rotary_emb.inv_freq", {}),
    "buffer without prefix": ("layers.0.attention.masked_bias", {}),
    "prediction layer": ("gpt_neox.layers.2.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    "another tower": ("vision_tower.layers.7.weight", {}),
}


@pytest.mark.parametrize("name", MORE)
def test_weights_that_a_class_omits_are_no_surplus_layers(tmp_path: Path, name: str) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    path, (weight, settings) = tmp_path / "source" / "model.safetensors", MORE[name]
    save_file(load_file(path) | {weight: torch.ones(2)}, path, {"format": "pt"})
    config = path.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    assert (import_checkpoint(tmp_path) / "manifest.json").is_file()


IN_MLP = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
WITHOUT_VOCABULARY = '{"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}}'


def with_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("kind", "damage", "named"),
    [
        ("gpt_neox", lambda folder: with_weight(folder, IN_MLP, None), f"lack {IN_MLP}, .* drawn at random"),
        (
            "gpt_neox",
            lambda folder: with_weight(folder, IN_MLP, torch.zeros(16, 16)),
            f"lack {IN_MLP}, as config.json wants it",
        ),
        (
            "gpt_neox",
            with_one_layer,
            r"weights have gpt_neox\.layers\.1\..*no such layer; correct its number of layers",
        ),
        ("gpt_neox", with_text("config.json", '{"model_type": "surprise"}'), "'surprise' is none of transformers"),
        ("gpt_neox", with_text("config.json", '{"model_type": "vit"}'), "no causal language model"),
        ("gpt_neox", lambda folder: (folder / "config.json").unlink(), "config.json: is missing or damaged"),
        ("gpt_neox", with_text("config.json", "{"), "config.json: is missing or damaged"),
        ("gpt_neox", lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        ("gpt_neox", with_text("model.safetensors", "{}"), "no causal language model"),
        ("gpt_neox", as_pickle, "is a pickle"),
        ("gpt_neox", shutil.rmtree, "is no directory"),
        (
            "original",
            with_text("model.safetensors", "garbage"),
            r"source/model\.safetensors: is damaged \(.*\); fetch it again",
        ),
        ("original", with_text("config.json", WITHOUT_VOCABULARY), "source: vocab_size: is missing; fetch config"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused_in_one_line(
    tmp_path: Path, kind: str, damage: Callable[[Path], object], named: str
) -> None:
    save_foreign(kind, tmp_path / "source")
    damage(tmp_path / "source")
    with refused(named):
        import_checkpoint(tmp_path)
    assert not list(tmp_path.glob("run/work/*/model"))


def test_content_other_than_the_config_names_and_a_pickle_of_transformers_are_refused(tmp_path: Path) -> None:
    save_foreign("gpt_neox", tmp_path / "source")
    with refused(r"model\.safetensors: has sha256 .*, expected 0000", CheckpointError):
        import_checkpoint(tmp_path, sha256={"model.safetensors": "0" * 64})
    as_pickle(tmp_path / "source")  # even when it is vouched for
    with refused("save the model with safetensors", CheckpointError):
        import_checkpoint(tmp_path, sha256={"pytorch_model.bin": sha256_of(tmp_path / "source" / "pytorch_model.bin")})


@pytest.mark.parametrize("layout", ["original", "published"])
def test_a_pickle_of_more_than_tensors_is_refused_in_one_line(tmp_path: Path, layout: str) -> None:
    source = tmp_path / "source"
    save_original_mamba2(source)
    if layout == "published":
        shutil.copyfile(PARITY / "mamba2-implicit" / "config.json", source / "config.json")
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    torch.save({"weight": Path("anything")}, path)
    with refused(r"_model\.bin: cannot be read with weights_only: it", CheckpointError):
        import_checkpoint(tmp_path, sha256={"pytorch_model.bin": sha256_of(path)})


def test_of_a_whole_file_and_shards_the_one_that_is_read_is_recorded(tmp_path: Path) -> None:
    source = shutil.copytree(PARITY / "mamba2-implicit", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file({name: value * 0 for name, value in weights.items()}, source / "shard.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "shard.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    run_dir = import_checkpoint(tmp_path)
    assert source_of(run_dir)["sha256"] == {
        name: sha256_of(source / name) for name in ("config.json", "model.safetensors")
    }
    assert all(parameter.abs().sum() > 0 for parameter in imported(run_dir).parameters() if parameter.ndim == 2)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_problems(tmp_path_factory.mktemp("data") / "s3-test-L12-h0.5")


def records_in(out: str) -> list[dict[str, Any]]:
    return json.loads(Path(out.splitlines()[-1]).read_text())["records"]


@pytest.mark.parametrize("kind", ["gpt_neox", "original"])
def test_any_checkpoint_is_evaluated_and_found_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problems: Path, kind: str
) -> None:
    folder = tmp_path / "models" / kind
    save_foreign(kind, folder)
    words = ("evaluate", "word-problem", "--model", str(folder), "--data", str(problems), "--device", "cpu")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    (record,) = records_in(out)
    assert (record["run"], record["phase"], record["seed"], record["mode"]) == (kind, "checkpoint", None, "parallel")
    assert record["source"]["path"] == str(folder)
    assert len(record["source"]["sha256"]["model.safetensors"]) == 64
    assert re.search(r"s3-test-L12-h0\.5 +parallel +12 ", out)
    code, again, err = run(capsys, *words)
    assert err.count("already done") == 2  # the import and the evaluation
    assert again == out
    save_foreign("llama", folder)  # another model in the same place
    _, other, _ = run(capsys, *words)
    assert other.splitlines()[-1] != out.splitlines()[-1]


def test_a_run_directory_is_evaluated_in_the_modes_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problems: Path
) -> None:
    trained = train_nothing(tmp_path, "implicit", "s3", VOCAB, {})
    words = ["word-problem", "--model", str(trained), "--data", str(problems), "--device", "cpu", "--out", "mine"]
    words += ["--mode", "blockwise", "--mode", "sequential", "--max-iter", "3", "--block-len", "4", "--stop", "token"]
    code, out, err = run(capsys, "evaluate", *words)
    assert code == 0, err
    blockwise, sequential = records_in(out)
    assert (blockwise["run"], blockwise["seed"], blockwise["source"]) == ("s3-implicit", 7, None)
    assert (blockwise["eval_block_len"], blockwise["eval_max_iter"], blockwise["eval_stop"]) == (4, 3, "token")
    assert sequential["eval_mode"] == "sequential"
    assert out.splitlines()[-1].startswith("mine/work/")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("word-problem", "Missing option '--model'; type `implicit-llm evaluate word-problem --help`"),
        ("word-problem --model gone --data DATA", "--model gone: has neither manifest.json nor config.json"),
        ("word-problem --model DATA --data DATA", "which has no model; give that of a training phase"),
        ("word-problem --model gone", "--data: is missing"),
        ("word-problem --model gone --data .", "no manifest there"),
        ("word-problem --model gone --data DATA --data DATA", "given already"),
        ("word-problem --model gone --data DATA --mode blokwise", "the text 'blokwise' is not one of blockwise"),
        ("word-problem --model gone --data DATA --mode sequential --block-len 4", "--block-len: is for"),
        ("word-problem --model gone --data DATA --sweep iter=1", "no setting 'iter' is swept"),
        ("perplexity --model x --data DATA", "is of kind word_problem, and perplexity reads token_stream"),
        ("word-problem --model gone --data DATA --sweep max-iter=a", "sweep.eval_max_iter[0]: expected an integer"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str], problems: Path, words: str, named: str
) -> None:
    given = [str(problems) if word == "DATA" else word for word in words.split()]
    code, _, err = run(capsys, "evaluate", *given)
    assert code == 2
    assert named in err.splitlines()[-1]
