"""Models that others saved are loaded whole, or refused in one line; no code comes with them.

Four small models in the published layout give the numbers that the published code gave: tests/data/parity/README.md
says how these were made; they agree to about 1e-3 in logits and 1 % in gradients.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

from implicit_llm import (
    ImplicitLlama3Config,
    SolverConfig,
    from_llama,
    from_mamba2,
    load_original_mamba2,
    sequential_forward,
    to_implicit,
)
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading import load_foreign
from implicit_llm.models.mamba2.loading import UntrustedCheckpoint
from implicit_llm.models.published import clean_name, read_pickle, read_safetensors
from implicit_llm_contracts.config import flops
from implicit_llm_contracts.runs.manifest import sha256_of
from tests.unit.checkpoint.foreign import mamba2_config, save_foreign, write_original_mamba2

PARITY = Path(__file__).parents[2] / "data" / "parity"


def test_a_model_is_loaded_in_fp32_however_it_was_saved(tmp_path: Path) -> None:
    save_foreign("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    shutil.copytree(PARITY / "mamba2-implicit", tmp_path / "published")
    config = tmp_path / "published" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    for folder in (tmp_path, tmp_path / "published"):
        assert {parameter.dtype for parameter in load_foreign(folder).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [("llama", "num_hidden_layers", 0), ("llama", "hidden_size", -64), ("gpt2", "n_layer", -1)],
)
def test_a_checkpoint_needs_sizes_of_at_least_one(tmp_path: Path, model_type: str, key: str, value: int) -> None:
    save_foreign("llama", tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text()) if model_type == "llama" else {}
    path.write_text(json.dumps({**saved, "model_type": model_type, key: value}))
    with pytest.raises(ModelConfigError, match=rf"^config\.json: {key}: {value} is not allowed; give an integer of at"):
        load_foreign(tmp_path)


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


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_read_by_name(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=is_zip)
    torch.testing.assert_close(read_pickle(path), {"a": torch.arange(3)})


DAMAGED = [b"", b".", b"X", b"X\x01\x00\x00\x00\xff.", b"h\x01.", b"\x80\x02}q\x00.", b"<html>"]
NO_TENSORS_BY_NAME = [[1, 2], torch.zeros(2), {"step": 3}, {"model": {"a": torch.zeros(2)}}, {0: torch.zeros(2)}]


@pytest.mark.parametrize("content", [*DAMAGED, *NO_TENSORS_BY_NAME])
def test_whatever_is_wrong_with_a_pickle_it_is_one_line(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    refusal = r"\A.*pytorch_model\.bin: cannot be read .*damaged, or holds more than tensors by name; .*safetensors\Z"
    with pytest.raises(ModelConfigError, match=refusal):
        read_pickle(path)


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_safetensors_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"\A.*model\.safetensors: is damaged \(.*\); fetch it again\Z"):
        read_safetensors(path)


@pytest.mark.parametrize("read", [read_pickle, read_safetensors])
def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "model")


VOCAB = 21  # of 24, padded


def transformers_model(*, tied: bool = True) -> Mamba2ForCausalLM:
    """A random model whose layers matter: large weights, and none that initialisation left at a constant."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(mamba2_config(vocab_size=24, tie_word_embeddings=tied, chunk_size=16)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.uniform_(-1.0, 1.5)
            elif "norm" in name or name.endswith(".D"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_in_fp64(tmp_path: Path, tied: bool) -> None:
    reference = transformers_model(tied=tied)
    write_original_mamba2(reference, tmp_path, vocab_size=VOCAB, tie_embeddings=tied)
    ours = load_original_mamba2(tmp_path)
    input_ids = torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = reference.double()(input_ids).logits.double(), ours.double()(input_ids).logits
    assert expected.std() > 0.5
    # transformers computes its norms and returns its logits in fp32 whatever the dtype.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert ours.solver is None


def test_a_pickle_is_read_only_for_who_vouches_for_it(tmp_path: Path) -> None:
    reference = transformers_model()
    write_original_mamba2(reference, tmp_path, is_pickle=True, vocab_size=VOCAB, tie_embeddings=True)
    digest = sha256_of(tmp_path / "pytorch_model.bin")
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
        ({"ssm_cfg": {}}, "ssm_cfg.layer: 'Mamba1' gives another layer"),
        ({"ssm_cfg": {"layer": "Mamba2", "ngroups": 2}}, "ssm_cfg.ngroups: 2"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "ssm_cfg.norm_before_gate"),
        ({"ssm_cfg": {"layer": "Mamba2", "surprise": 1}}, "ssm_cfg.surprise"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, 0.1]}}, "ssm_cfg.dt_limit"),
        ({"n_layers": 1}, "n_layers: 1 is unknown and may give another layer"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx: \[1\]"),
        ({"n_layer": 3}, r"do not belong together.*layers\.2\."),
        ({"d_model": 32}, "size mismatch"),
        ({"vocab_size": None}, "vocab_size: is missing; fetch config.json again"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write_original_mamba2(transformers_model(), tmp_path, **{"vocab_size": VOCAB} | changes)
    with pytest.raises(ModelConfigError, match=named):
        load_original_mamba2(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_mamba2_of_transformers_keeps_its_logits_shares_its_weights_and_becomes_implicit(tied: bool) -> None:
    theirs = transformers_model(tied=tied)
    ours = from_mamba2(theirs)
    input_ids = torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids).logits
        torch.testing.assert_close(ours(input_ids).logits, expected, rtol=1e-4, atol=1e-3)
    assert ours.backbone.embeddings.weight.data_ptr() == theirs.backbone.embeddings.weight.data_ptr()
    implicit = to_implicit(theirs, {"mode": "unrolled"})
    out = implicit(input_ids, labels=input_ids)
    out.loss.backward()
    layer, same = implicit.backbone.layers[0].mixer, theirs.backbone.layers[0].mixer
    assert (layer.in_proj.weight - same.in_proj.weight).abs().max() < 1e-6
    assert implicit.backbone.injection.proj.v.grad.abs().max() > 0


SMALL = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GROUPED = {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "grouped": GROUPED,
    "one key": {"num_key_value_heads": 1},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0, **GROUPED},
}
INPUT_IDS = torch.randint(3, 37, (2, 40), generator=torch.Generator().manual_seed(0))


def _llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.3, **fields)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_llama_gives_the_logits_and_tokens_that_it_gives_in_transformers(kind: str, tmp_path: Path) -> None:
    _llama(**KINDS[kind]).save_pretrained(tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ours = from_llama(theirs)
    expected = theirs(INPUT_IDS).logits
    torch.testing.assert_close(ours(INPUT_IDS).logits, expected, atol=1e-4, rtol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 6, "attention_mask": torch.ones_like(INPUT_IDS), "pad_token_id": 0}
    assert torch.equal(ours.generate(INPUT_IDS, **options), theirs.generate(INPUT_IDS, **options))
    assert ours.model.embed_tokens.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    ours.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(INPUT_IDS).logits, ours(INPUT_IDS).logits)


def test_what_is_no_language_model_or_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="or a Llama or Mamba2 of transformers, got Linear; give one of these"):
        to_implicit(torch.nn.Linear(2, 2))
    for text in (None, "{", '{"model_type": "llama"}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelConfigError, match=r"config\.json: is missing, or not that of an original Mamba"):
            load_original_mamba2(tmp_path)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type: 'dynamic'"),
        (_llama(attention_bias=True), "attention_bias: True"),
        (_llama(mlp_bias=True), "mlp_bias: True"),
        (_llama(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (Mamba2ForCausalLM(mamba2_config(n_groups=2)), "n_groups: 2"),
        (Mamba2ForCausalLM(mamba2_config(use_bias=True)), "use_bias: True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_block_does_not_have_is_refused_by_name(model: PreTrainedModel, named: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"^{named}"):
        to_implicit(model)


def test_other_models_and_impossible_sizes_are_refused() -> None:
    for model in (GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)), LlamaModel(LlamaConfig(**SMALL))):
        with pytest.raises(ModelConfigError, match=r"^from_llama takes a LlamaForCausalLM"):
            from_llama(model)
    for fields, key in (({"num_key_value_heads": 3}, "num_key_value_heads: 3"), ({"head_dim": 5}, "head_dim: 5")):
        with pytest.raises(ModelConfigError, match=f"^{key}"):
            ImplicitLlama3Config(**{**SMALL, **fields})
    with pytest.raises(ModelConfigError, match=r"^rope_scaling.theta: linear has exactly the settings factor"):
        ImplicitLlama3Config(**SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0, "theta": 5.0})


def test_a_grouped_llama_becomes_implicit_and_its_modes_agree() -> None:
    solver = SolverConfig(tol=1e-9, eval_max_iter=400, eval_block_len=8, phantom_steps=2)
    model = to_implicit(from_llama(_llama(**KINDS["llama3"])), solver=solver).double().eval()
    assert model.model.injection.proj.out_features == (4 + 2 * 2) * 10
    assert flops.num_parameters(model.config.to_dict()) == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "injection" not in name:
                parameter.fill_(0.1)  # f contracts
        mask = torch.ones_like(INPUT_IDS)
        mask[0, :5] = 0
        found = model(INPUT_IDS, attention_mask=mask)
        by_token = sequential_forward(model, INPUT_IDS, attention_mask=mask)
    assert found.solver_stats.is_converged.all()
    torch.testing.assert_close(found.logits[mask.bool()], by_token.logits[mask.bool()], atol=1e-5, rtol=1e-5)
    model.train()(INPUT_IDS, labels=INPUT_IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("convert", [from_mamba2, from_llama, to_implicit, lambda ours: to_implicit(from_llama(ours))])
def test_a_converted_model_stays_in_the_mode_of_its_model(convert: Callable[[Any], Any], is_training: bool) -> None:
    theirs: Any = transformers_model() if convert is from_mamba2 else _llama()
    converted = convert(theirs.train(is_training))
    assert {module.training for module in converted.modules()} == {is_training}


def test_a_loaded_model_is_in_evaluation_mode(tmp_path: Path) -> None:
    write_original_mamba2(transformers_model(), tmp_path / "original", vocab_size=VOCAB)
    to_implicit(_llama().train()).save_pretrained(tmp_path / "ours")
    for load, folder in (
        (load_original_mamba2, tmp_path / "original"),
        (AutoModelForCausalLM.from_pretrained, tmp_path / "ours"),
        (AutoModelForCausalLM.from_pretrained, PARITY / "mamba2-implicit"),
        (load_foreign, tmp_path / "ours"),
    ):
        assert not any(module.training for module in load(folder).modules())


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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", EXPLICIT)
def test_the_head_of_a_published_model_is_its_own_unless_it_is_tied(name: str, tied: bool, tmp_path: Path) -> None:
    config = json.loads((PARITY / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_embeddings": tied}))
    weights = load_file(PARITY / name / "model.safetensors")
    embedding = Fixture(name).model.get_input_embeddings().weight
    head = torch.randn_like(embedding)
    save_file(weights | {"lm_head.weight": head.detach()}, tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, embedding if tied else head)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(AutoModel.from_pretrained(tmp_path).get_input_embeddings().weight, embedding)


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
    with pytest.raises((FileNotFoundError, ModelConfigError)):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)


def test_an_index_of_shards_leads_to_no_other_folder(tmp_path: Path) -> None:
    write_config(tmp_path, weight_map={"model.embedding": "../elsewhere/pytorch_model.bin"})
    with pytest.raises(ModelConfigError, match=r"index\.json: names '\.\./elsewhere/pytorch_model\.bin'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
