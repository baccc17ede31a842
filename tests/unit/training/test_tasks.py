"""All tasks train by the same code: next tokens, questions among ignored positions, any Hugging Face model.

The text is a real stream of tokens, as the data stages make it from text files. Wrong values are refused by key.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.training.model import ModelError, build_model
from implicit_llm.training.optimizer import learning_rate
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.training import Runtime, ScheduleConfig, TrainConfig
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.fetched_files import FetchedFilesError
from implicit_llm_contracts.runs.manifest import sha256_of
from tests.refusals import refused
from tests.unit.data.text_samples import VOCAB_SIZE, Project, write_corpus
from tests.unit.training.small_runs import (
    EXPLICIT,
    FREE,
    IMPLICIT,
    LLAMA,
    LSTM,
    UNROLLED,
    Undisturbed,
    logged,
    make_model,
    make_rows,
    outcome,
    train,
    train_config,
    train_until,
    work_of,
)

VOCAB = VOCAB_SIZE + 4  # padded, as published
LM = {"task": "language_model", "labels": "next_token"}
QA = {"task": "catbabi", "labels": "aligned"}
LLAMA3 = {
    "model_type": "implicit_llama3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "mamba": {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "lstm": LSTM | {"vocab_size": VOCAB},
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 1,
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a training stream in three shards, in rows of 16 tokens."""
    project = Project(tmp_path_factory.mktemp("project"))
    project.run_all(write_corpus(project.downloads, documents_per_file=8), num_shards=3)
    return project.root / "results" / "data" / "x-train"


@pytest.fixture(scope="module")
def undisturbed_text(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), text)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine of ten positions have no label, so that some micro-batches have hardly any."""
    return make_rows(tmp_path_factory.mktemp("questions") / "qa-train", ignored_share=0.9)


def stored_model(folder: Path, kind: str = "gpt2", seed: int = 0) -> Any:
    """An untrained model of SMALL, saved to the folder."""
    torch.manual_seed(seed)
    model = make_model(SMALL[kind])
    model.save_pretrained(folder)
    return model


def built(model: dict[str, Any]) -> Any:
    """The model that a phase of this model starts from."""
    return build_model(fill(TrainConfig, train_config(SMALL["gpt2"], **LM) | {"model": model}, "x"), VOCAB, "x")


def config_of(task: dict[str, Any], model: dict[str, Any] = IMPLICIT, **changes: Any) -> dict[str, Any]:
    return train_config({**model, "vocab_size": VOCAB}, **task, **changes)


@pytest.mark.parametrize(
    ("model", "micro_step"),
    [(LLAMA3, 19), ({**IMPLICIT, "is_implicit": False}, 19), *((IMPLICIT, step) for step in (1, 6, 7, 16))],
)
def test_a_language_model_learns_and_resumes_inside_an_accumulation_bit_for_bit(
    tmp_path: Path, text: Path, undisturbed_text: Undisturbed, model: dict[str, Any], micro_step: int
) -> None:
    config, parts = config_of(LM, model), tmp_path / "parts" / "only"
    # Four micro-batches a step: the 19th is the third of step 5.
    train_until(f"train.micro_step:raise@{micro_step}", parts, config, text, micro_batch_size=2, save_steps=3)
    train_until("train.after_step:sigterm@3", parts, config, text, micro_batch_size=2)  # an epoch ends within step 7
    train(parts, config, text, micro_batch_size=2)
    whole, points = undisturbed_text.of(config, micro_batch_size=2)
    assert outcome(parts) == (whole, points)
    assert points[-1][1]["loss"] < points[0][1]["loss"] - 0.1
    assert not any(key.startswith("accuracy") for _, values in points for key in values)


def test_questions_among_ignored_positions_are_what_is_learned_and_counted(tmp_path: Path, questions: Path) -> None:
    config = config_of(QA, {**IMPLICIT, "dropout": 0.0})
    whole, parts = tmp_path / "whole" / "only", tmp_path / "parts" / "only"
    train(whole, config, questions, micro_batch_size=2)
    train_until("train.micro_step:raise@19", parts, config, questions, micro_batch_size=2, save_steps=2)
    train(parts, config, questions, micro_batch_size=2)
    assert outcome(parts) == outcome(whole)
    points = logged(whole)
    assert all(0 <= values["accuracy"] <= 1 for _, values in points)
    assert all("accuracy_last10" not in values for _, values in points)
    # The batch as a whole has the same loss: it is over the labels, not over the micro-batches.
    train(tmp_path / "at once" / "only", config, questions)
    for key in ("loss", "accuracy"):
        at_once = [values[key] for _, values in logged(tmp_path / "at once" / "only")]
        assert [values[key] for _, values in points] == pytest.approx(at_once, rel=1e-3)


def test_a_batch_without_any_label_is_no_error(tmp_path: Path, run_dir: Path) -> None:
    train(run_dir, config_of(QA, LLAMA), make_rows(tmp_path / "data" / "nothing", ignored_share=1.0))
    assert {values["loss"] for _, values in logged(run_dir)} == {0.0}


@pytest.mark.parametrize(
    ("model", "solver"),
    [
        (IMPLICIT, FREE),
        (LLAMA3, UNROLLED),
        ({**IMPLICIT, "is_implicit": False}, None),
        (SMALL["gpt2"], None),
    ],
)
def test_computing_activations_again_gives_the_same_numbers(
    tmp_path: Path, text: Path, model: dict[str, Any], solver: dict[str, Any] | None
) -> None:
    config = config_of(LM, model, phase={"solver": solver})
    for name, again in (("stored", False), ("again", True)):
        train(tmp_path / name / "only", config, text, gradient_checkpointing=again)
    assert outcome(tmp_path / "again" / "only") == outcome(tmp_path / "stored" / "only")


def test_a_model_that_cannot_compute_again_is_refused(
    run_dir: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.LlamaPreTrainedModel.supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot .*; leave out gradient_checkpointing"):
        train(run_dir, config_of(LM, LLAMA), text, gradient_checkpointing=True)


@pytest.mark.parametrize(("kind", "task"), [("gpt2", "language_model"), ("mamba", "catbabi"), ("lstm", "word_problem")])
def test_any_pretrained_model_trains_on_any_task(
    tmp_path: Path, run_dir: Path, data: Path, text: Path, questions: Path, kind: str, task: str
) -> None:
    stored = stored_model(tmp_path / "stored", kind)
    config = train_config(SMALL[kind], task=task, labels="next_token" if task == "language_model" else "aligned")
    config["model"] = {"pretrained": str(tmp_path / "stored")}
    training_set = {"word_problem": data, "catbabi": questions, "language_model": text}[task]
    manifest = train(run_dir, config, training_set)
    points = dict(logged(run_dir))
    accuracy = {"word_problem": {"accuracy_last10"}, "catbabi": {"accuracy"}, "language_model": set()}[task]
    common = {"loss", "grad_norm", "learning_rate", "tokens", "flops"}
    assert set(points[8]) == common | accuracy
    assert manifest.summary["num_parameters"] == stored.num_parameters()
    assert manifest.summary["flops"] == 6 * stored.num_parameters() * manifest.summary["tokens"]
    trained = AutoModelForCausalLM.from_pretrained(work_of(run_dir) / "model")
    names = dict(stored.named_parameters())
    moved = [(names[name] - tensor).abs().max().item() for name, tensor in trained.named_parameters()]
    assert 0 < max(moved) < 0.1  # from the stored weights, a few steps


def test_a_pretrained_mamba2_becomes_implicit_where_its_phase_has_a_solver(
    tmp_path: Path, run_dir: Path, text: Path
) -> None:
    stored = stored_model(tmp_path / "stored", "mamba2")
    config = config_of(LM, SMALL["mamba2"], phase={"solver": UNROLLED})
    config["model"] = {"pretrained": str(tmp_path / "stored")}
    train(run_dir, config, text)
    trained = AutoModelForCausalLM.from_pretrained(run_dir)
    assert trained.solver.mode == "unrolled"
    (mine, theirs) = (model.backbone.layers[0].mixer.in_proj.weight for model in (trained, stored))
    assert 0 < (mine - theirs).abs().max() < 0.1  # from the stored weights, a few steps


def test_a_pretrained_model_that_cannot_become_implicit_is_refused(tmp_path: Path) -> None:
    stored_model(tmp_path)
    config = train_config(SMALL["gpt2"], **LM, phase={"solver": UNROLLED}) | {"model": {"pretrained": str(tmp_path)}}
    with refused("cannot become implicit: .*Llama or Mamba2 .*set the solver of its phases to null", ModelError):
        build_model(fill(TrainConfig, config, "x"), VOCAB, "x")


def test_a_model_of_another_package_is_made_once_the_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_models.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel\n"
        "class OtherConfig(GPT2Config):\n    model_type = 'other'\n"
        "class Other(GPT2LMHeadModel):\n    config_class = OtherConfig\n"
        "AutoConfig.register('other', OtherConfig)\nAutoModelForCausalLM.register(OtherConfig, Other)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fields = SMALL["gpt2"] | {"model_type": "other", "package": "other_models"}
    assert type(built(fields)).__name__ == "Other"
    with refused(r"^x\.model\.package: not_there cannot be imported .*install it", ModelError):
        built(fields | {"package": "not_there"})


def test_a_pretrained_model_that_is_not_there_or_not_whole_is_the_users_error(tmp_path: Path) -> None:
    stored_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    for path, message in ((tmp_path / "nowhere", "nowhere is no folder; .*revision"), (tmp_path, "no causal language")):
        with refused(rf"^x\.model\.pretrained: .*{message}", ModelError):
            built({"pretrained": str(path)})


def test_a_pretrained_model_with_too_few_tokens_asks_for_fewer_in_the_data(tmp_path: Path) -> None:
    stored_model(tmp_path)
    config = filled(train_config(SMALL["gpt2"], **LM) | {"model": {"pretrained": str(tmp_path)}})
    with refused(rf"vocab_size: {VOCAB} tokens are fewer than the {VOCAB + 1} of the data; lower that of", ModelError):
        build_model(config, VOCAB + 1, "x")


def test_a_pretrained_model_is_the_one_that_was_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path))
    model = stored_model(tmp_path / "mine")
    path = tmp_path / "mine" / "model.safetensors"
    planned = {"pretrained": "mine", "sha256": {path.name: sha256_of(path)}}
    assert torch.equal(built(planned).lm_head.weight, model.lm_head.weight)
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"x\.model\.sha256: .*mine/model\.safetensors has changed .*bring back"):
        built(planned)


def test_a_pretrained_model_of_the_hub_is_the_fetched_one_of_that_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path / "downloads"))
    folder = tmp_path / "downloads" / "models" / "owner" / "gpt2"
    for commit, seed in (("a" * 40, 0), ("b" * 40, 1)):
        model = stored_model(folder / commit, seed=seed)

    def start(commit: str) -> torch.Tensor:
        return built({"pretrained": "owner/gpt2", "revision": commit}).lm_head.weight

    assert torch.equal(start("b" * 40), model.lm_head.weight)
    assert not torch.equal(start("a" * 40), model.lm_head.weight)
    with pytest.raises(FetchedFilesError, match="owner/gpt2 has not been fetched; type `implicit-llm prefetch"):
        start("c" * 40)


def filled(config: dict[str, Any]) -> TrainConfig:
    return fill(TrainConfig, config, "train/x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsize": 8}, r"unknown key 'batchsize'.*batch_size"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"labels": "shifted"}, "aligned, next_token"),
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"phase": {"solver": {**FREE, "max_itr": 3}}}, "phase.solver: .*max_iter"),
        ({"phase": {"solver": {**FREE, "tol": 3.0}}}, "phase.solver.tol: 3.0"),
        ({"phase": {"start_step": -1}}, r"phase\.start_step: -1 .*at least 0"),
        ({"phase": {"start_step": 7, "end_step": 7}}, r"phase\.end_step: 7 .*give more than start_step, 7"),
        ({"phase": {"end_step": 9}, "total_steps": 8}, r"total_steps: 8 .*give at least phase\.end_step, 9"),
        ({"model": {"pretrained": "owner/gpt2", "revision": "main"}}, r"model\.revision: 'main' is no commit; give"),
        ({"phase": {"state_passing": 4}, **QA}, r"phase\.state_passing: words alone can be joined, not .* of catbabi"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**32}, "seed"),
        ({"optimizer": {"beta1": 0.9, "beta2": 1.0, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}}, "beta2"),
        (
            {"optimizer": {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}},
            "max_grad",
        ),
        ({"optimizer": {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}}, "max_grad_norm' is missing"),
    ],
)
def test_a_wrong_value_is_refused_by_key_in_one_line(changes: dict[str, Any], message: str) -> None:
    phase = {**train_config()["phase"], **changes.pop("phase", {})}
    with refused(f"^train/x.*{message}", ConfigError):
        filled({**train_config(), **changes, "phase": phase})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threads": 0}, r"threads: .*found 0"),
        ({"device": "gpu"}, "auto, cpu, cuda"),
        ({"save_evry_s": 1}, "save_every_s"),
    ],
)
def test_a_wrong_runtime_option_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(Runtime, values, "runtime")


@pytest.mark.parametrize(
    ("model", "solver", "message"),
    [
        ({**LLAMA, "model_type": "lama"}, None, r"model_type: .*'lama'; did you mean 'llama'"),
        ({**LLAMA, "hiden_size": 16}, None, r"model\.hiden_size: .* did you mean 'hidden_size'"),
        ({**LLAMA, "vocab_size": 5}, None, r"vocab_size: 5 tokens are fewer than the 6"),
        (LLAMA, FREE, r"phase\.solver: the model is explicit"),
        (IMPLICIT, None, r"phase\.solver: the model is implicit"),
        ({**IMPLICIT, "head_dim": 7}, FREE, "head_dim"),
        (LLAMA3, FREE, r"phase\.state_passing: ImplicitLlama3ForCausalLM has no state of fixed size"),
    ],
)
def test_a_model_that_cannot_be_is_refused_as_the_users_error(
    model: dict[str, Any], solver: dict[str, Any] | None, message: str
) -> None:
    config = filled(train_config(model, phase={"solver": solver, "state_passing": 4 if model is LLAMA3 else None}))
    with refused(message, (ModelError, ValueError)) as caught:
        build_model(config, vocab_size=6, where="train/x")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("model", [EXPLICIT, LSTM, LSTM | {"num_hidden_layers": 2}])
def test_a_word_after_another_is_read_as_the_end_of_both_together_without_a_gradient_into_the_first(
    model: dict[str, Any],
) -> None:
    built = build_model(filled(train_config(model, phase={"state_passing": 4})), vocab_size=6, where="train/x").train()
    ids_BL = torch.randint(6, (3, 10), generator=torch.Generator().manual_seed(0))
    whole_BLV = built(input_ids=ids_BL).logits
    cache = ConvergedStateCache()
    parts = [built(input_ids=part_BL, past_key_values=cache).logits for part_BL in ids_BL.split(5, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BLV)
    assert cache.get_seq_length() == 10
    assert not any(state.requires_grad for layer in cache.prefix.layers for state in layer)
    embedding = next(module for module in built.modules() if isinstance(module, torch.nn.Embedding))
    (gradient,) = torch.autograd.grad(parts[1][:, :, 0].sum(), embedding.weight)
    assert gradient[[*set(range(6)) - set(ids_BL[:, 5:].flatten().tolist())]].count_nonzero() == 0


@pytest.mark.parametrize("model", [EXPLICIT, LSTM])
def test_the_restart_keeps_a_model_at_chance_from_carrying_states(
    tmp_path: Path, data: Path, model: dict[str, Any]
) -> None:
    carried, long = {}, {"end_step": 64, "state_passing": 8}
    for restarts in (True, False):
        config = train_config(model, phase=long | {"restart_when_wrong": restarts}, total_steps=64)
        manifest = train(tmp_path / str(restarts) / "only", config, data)
        carried[restarts] = [values["carried_share"] for _, values in logged(tmp_path / str(restarts) / "only")]
        assert manifest.summary["metrics"]["carried_share"] == pytest.approx(np.mean(carried[restarts][-50:]))
    assert carried[False][:8] == [0.0, 0.875, 0.75, 0.875, 0.5, 0.875, 0.75, 0.875]
    assert np.mean(carried[False]) > 0.6
    assert np.mean(carried[True]) < 0.3  # a sixth of the answers is right by chance


def test_the_seed_alone_decides_the_initial_weights() -> None:
    first, second, other = (
        build_model(filled(train_config(seed=seed)), 6, "x").backbone.embeddings.weight for seed in (1, 1, 2)
    )
    assert first.equal(second)
    assert not first.equal(other)


LINEAR = ScheduleConfig("linear", peak_learning_rate=1.0, final_learning_rate=0.0, warmup_fraction=0.1)
STABLE = ScheduleConfig("warmup_stable_decay", 1.0, 0.01, warmup_fraction=0.1, decay_fraction=0.2)


def test_linear_rises_to_the_peak_and_falls_to_the_end() -> None:
    rates = [learning_rate(LINEAR, step, 100) for step in range(100)]
    assert [rates[step] for step in (0, 55, 99)] == pytest.approx([0.1, 0.5, 1 / 90])
    assert rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(LINEAR, 9, 96) == 1.0 > learning_rate(LINEAR, 8, 96)  # at the next whole step after 9.6
    assert learning_rate(ScheduleConfig("linear", 0.5, 0.0, warmup_fraction=0.0), 0, 10) == 0.5


def test_stable_part_keeps_the_peak_and_the_decay_is_one_minus_square_root() -> None:
    rates = [learning_rate(STABLE, step, 100) for step in range(100)]
    assert rates[10:81] == [1.0] * 71
    for step in range(80, 100):
        assert rates[step] == pytest.approx(0.01 + 0.99 * (1 - math.sqrt((step - 80) / 20)))
    assert rates[99] > 0.01


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "linear", "decay_fraction": 0.2}, "decay_fraction"),
        ({"decay_fraction": None}, "decay_fraction"),
        ({"decay_fraction": 0.95}, "warmup_fraction"),
        ({"warmup_fraction": 1.5}, "warmup_fraction"),
        ({"peak_learning_rate": 0.0}, "peak_learning_rate"),
        ({"final_learning_rate": 2.0}, "final_learning_rate"),
        ({"peak_learning_rate": math.nan}, "peak_learning_rate"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_key(changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ScheduleConfig(**{**STABLE.__dict__, **changes})
