"""What a call would ignore, or could not do, is refused by one line that says what to pass instead."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

import implicit_llm
from implicit_llm.analysis.jacobian import step_after
from implicit_llm.models import lstm
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.lstm import LstmConfig
from implicit_llm_contracts.errors import ConfigError
from tests.pages import ROOT

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
GPT2: Any = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=23))


ENDS_IN_PADDING = torch.tensor([[1, 2, 3], [4, 5, 0]])
PADDED = {"max_new_tokens": 2, "pad_token_id": 0, "eos_token_id": 22}


def _generate_after(model: Any, mask: list[list[int]]) -> torch.Tensor:
    return model.generate(IDS, attention_mask=torch.tensor(mask), max_new_tokens=2, pad_token_id=0)


def _generate_again(model: Any, padded: int) -> torch.Tensor:
    """Generate a second turn after a cached first one; the second has padding at this position."""
    cache = ConvergedStateCache()
    first = model.generate(IDS, past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    both = torch.cat([first, IDS], dim=1)
    mask = torch.ones_like(both)
    mask[1, padded] = 0
    return model.generate(both, attention_mask=mask, past_key_values=cache, max_new_tokens=2, pad_token_id=0)


MISSPELT = "'output_hidden_state'; did you mean 'output_hidden_states'"
CALLS: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda model: model(IDS, output_hidden_state=True), TypeError, MISSPELT),
    (lambda model: model.base(IDS, output_hidden_state=True), TypeError, MISSPELT),
    (lambda model: model(IDS, output_attentions=True), ValueError, "output_attentions"),
    (
        lambda model: model.generate(IDS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True),
        ValueError,
        "output_attentions",
    ),
    *(
        (
            lambda model, kernels=kernels: AutoModelForCausalLM.from_config(model.config, attn_implementation=kernels),
            ValueError,
            f"attn_implementation='{kernels}' .*select_kernels",
        )
        for kernels in ("eager", "flash_attention_2")
    ),
    (lambda model: model.set_attn_implementation("eager"), ValueError, "attn_implementation='eager'"),
    (
        lambda model: model.train()(IDS, eval_mode="sequential"),
        ValueError,
        "eval_mode is for implicit models in evaluation mode",
    ),
    *(
        (lambda model, name=name: model(IDS, **{name: torch.tensor([0, 1])}), ValueError, f"{name}: packed documents")
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
    ),
    (lambda model: _generate_after(model, [[1, 1, 1], [1, 1, 0]]), ValueError, "a prompt ends in padding, .* left"),
    (lambda model: _generate_again(model, -1), ValueError, "a prompt ends in padding, .* left"),
    (lambda model: model.generate(ENDS_IN_PADDING, **PADDED), ValueError, "a prompt ends in padding, .* left"),
    (
        lambda model: model.generate(ENDS_IN_PADDING, use_cache=False, **PADDED),
        ValueError,
        "a prompt ends in padding, .* left",
    ),
    *(
        (export, NotImplementedError, "would fix the number of iterations of an implicit model")
        for export in (
            lambda model: torch.export.export(model, (IDS,), strict=False),
            lambda model: torch.export.export(model.train(), (IDS,), strict=False),
            lambda model: torch.jit.trace(lambda ids: model.requires_grad_(False)(ids).logits, (IDS,)),
        )
    ),
    (lambda model: step_after(model, IDS[0]), TypeError, r"got Implicit\w+ForCausalLM.*pass model\.base"),
    (lambda model: implicit_llm.to_implicit(GPT2), TypeError, "a Llama or Mamba2 of transformers, got GPT2LMHeadModel"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_what_a_call_would_ignore_or_cannot_do_is_refused(
    make_model, family: str, call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    model = make_model(family, dtype=torch.float32)
    model(IDS, output_attentions=None, return_dict=True)
    with pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
            ValueError,
            "attention_mask: an LSTM would read padding",
        ),
        ({"labels": IDS}, TypeError, "takes no argument 'labels'"),
        ({"use_cache": True}, TypeError, "takes no argument 'use_cache'"),
    ],
)
def test_the_lstm_refuses_what_it_would_ignore(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = AutoModelForCausalLM.from_config(LstmConfig(vocab_size=23, hidden_size=8))
    assert model(IDS, attention_mask=torch.ones_like(IDS), labels=None, use_cache=False).logits.shape == (2, 3, 23)
    with pytest.raises(error, match=message):
        model(IDS, **arguments)


def test_a_prompt_is_padded_on_the_left_or_between(make_model, family: str) -> None:
    for mask in ([[1, 1, 1], [0, 1, 1]], [[1, 1, 1], [1, 0, 1]]):
        assert _generate_after(make_model(family, dtype=torch.float32), mask).shape == (2, 5)
    model = make_model(family, dtype=torch.float32)
    assert _generate_again(model, -2).shape == (2, 10)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]])  # the second chunk ends in padding
    settings = {"max_new_tokens": 2, "pad_token_id": 0, "prefill_chunk_size": 2}
    assert model.generate(IDS.repeat(1, 2), attention_mask=mask, **settings).shape == (2, 8)


def test_an_explicit_model_is_exported_with_its_numbers(make_model, family: str) -> None:
    model = make_model(family, "explicit", dtype=torch.float32)
    exported = torch.export.export(model, (IDS,), strict=False).module()
    torch.testing.assert_close(exported(IDS.flip(0)).logits, model(IDS.flip(0)).logits)


def test_an_evaluation_mode_and_a_step_of_attention_are_refused_where_there_are_none(make_model) -> None:
    with pytest.raises(ValueError, match="eval_mode is for implicit models in evaluation mode"):
        make_model("mamba2", "explicit")(IDS, eval_mode="sequential")
    with pytest.raises(TypeError, match="got ImplicitLlama3Model"):
        step_after(make_model("llama3").base, IDS[0])


def test_a_cache_of_another_kind_model_or_batch_is_refused(make_model, family: str) -> None:
    model, other = (
        make_model(name, dtype=torch.float32) for name in (family, {"mamba2": "llama3"}.get(family, "mamba2"))
    )
    for foreign in (DynamicCache(), ((torch.zeros(1), torch.zeros(1)),)):
        with pytest.raises(ValueError, match=f"a {type(foreign).__name__} holds no converged states"):
            model(IDS, past_key_values=foreign)
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the cache holds 2 sequences, but the input has 1"):
        model(IDS[:1], past_key_values=cache)
    maker = f"implicit_{family} of 1 layers and width 16"
    with pytest.raises(ValueError, match=f"the cache comes from {maker}, but the model is"):
        other(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_a_misspelt_solver_setting_names_the_nearest_where_it_is_data(make_model) -> None:
    model = make_model("mamba2")
    with pytest.raises(TypeError, match="'methd'"):
        implicit_llm.SolverConfig(methd="plain")  # type: ignore[call-arg]
    ways: list[Any] = [
        lambda: setattr(model, "solver", {"methd": "plain"}),
        lambda: implicit_llm.load_config("mamba2-130m-implicit", solver={"methd": "plain"}),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match=r"solver: unknown key 'methd'; did you mean 'method'\?"):
            way()
    with pytest.raises(ConfigError, match="solver: expected a mapping, found 3"):
        implicit_llm.SolverConfig.of(3)  # type: ignore[arg-type]


SAVED = {"tol": 0.125, "eval_block_len": 8, "eval_stop": "sequence", "tau": 0.5}
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "assigned to the model": lambda model, given: setattr(model, "solver", given) or model.solver,
    "assigned to the configuration": lambda model, given: setattr(model.config, "solver", given) or model.solver,
    "updating the configuration": lambda model, given: model.config.update({"solver": given}) or model.solver,
    "loading the model": lambda model, given: type(model).from_pretrained(model.name_or_path, solver=given).solver,
    "loading by AutoModel": lambda model, given: (
        AutoModelForCausalLM.from_pretrained(model.name_or_path, solver=given).solver
    ),
    "loading the configuration": lambda model, given: (
        AutoConfig.from_pretrained(model.name_or_path, solver=given).solver
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_dict_of_solver_settings_changes_those_and_keeps_the_saved_others(make_model, tmp_path, way: str) -> None:
    first = make_model("mamba2", dtype=torch.float32, **SAVED)
    first.save_pretrained(tmp_path)
    for given in ({}, {"method": "anderson"}, {"eval_max_iter": 500, "max_iter": 3}, {"eval_max_iter": None}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert WAYS[way](model, given) == replace(first.solver, **given)
    record = implicit_llm.SolverConfig(tol=0.2, method="anderson")
    assert WAYS[way](AutoModelForCausalLM.from_pretrained(tmp_path), record) == record  # a record is whole


def test_a_named_configuration_keeps_the_solver_settings_that_are_not_replaced() -> None:
    shipped = implicit_llm.load_config("mamba2-130m-implicit").solver
    config = implicit_llm.load_config("mamba2-130m-implicit", solver={"tol": 0.2})
    assert config.solver == replace(shipped, tol=0.2)  # type: ignore[type-var]
    assert config.to_dict()["solver"]["max_iter"] == 24


def test_a_dict_of_solver_settings_is_complete_by_itself_where_no_solver_is_saved(make_model) -> None:
    explicit = make_model("mamba2", "explicit")
    assert implicit_llm.to_implicit(explicit, solver={"tol": 0.2}).solver == implicit_llm.SolverConfig(tol=0.2)
    assert implicit_llm.ImplicitMamba2Config(solver={"tol": 0.2}).solver == implicit_llm.SolverConfig(tol=0.2)


def test_a_published_model_keeps_the_solver_settings_that_a_dict_does_not_name() -> None:
    path = ROOT / "tests" / "data" / "parity" / "mamba2-implicit"
    published = AutoModelForCausalLM.from_pretrained(path).solver
    for load in (AutoModelForCausalLM.from_pretrained, implicit_llm.ImplicitMamba2ForCausalLM.from_pretrained):
        assert load(path, solver={"tol": 0.3}).solver == replace(published, tol=0.3)


def test_a_converted_model_generates_by_the_settings_of_the_first(make_model, family: str) -> None:
    explicit = make_model(family, "explicit", dtype=torch.float32)
    explicit.generation_config.update(max_new_tokens=3, top_k=7, pad_token_id=0, eos_token_id=22)
    implicit = implicit_llm.to_implicit(explicit)
    assert implicit.generation_config.to_dict() == explicit.generation_config.to_dict()
    implicit.generation_config.top_k = 1
    assert explicit.generation_config.top_k == 7


@pytest.mark.parametrize("family", ["mamba2-130m-implicit", "llama3-130m-explicit"])
def test_a_misspelt_field_of_a_configuration_names_the_nearest(family: str, tmp_path) -> None:
    config = type(implicit_llm.load_config(family))
    with pytest.raises(ModelConfigError, match=r"hiden_size: .* has no such field; did you mean 'hidden_size'\?"):
        config(hiden_size=64)
    config(task_specific_params={"any": 1}, num_labels=3).save_pretrained(tmp_path)  # further ones are kept
    assert config.from_pretrained(tmp_path).task_specific_params == {"any": 1}


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 0), ("hidden_size", -768), ("vocab_size", 0)])
@pytest.mark.parametrize("name", ["mamba2-130m-implicit", "llama3-130m-explicit"])
def test_a_configuration_needs_sizes_of_at_least_one(name: str, key: str, value: int) -> None:
    with pytest.raises(ModelConfigError, match=rf"^{key}: {value} is not allowed; give an integer of at least 1$"):
        implicit_llm.load_config(name, **{key: value})


def test_loading_refuses_fields_that_contradict_what_was_saved(make_model, tmp_path) -> None:
    for kind in ("implicit", "explicit"):
        make_model("mamba2", kind, dtype=torch.float32).save_pretrained(tmp_path / kind)
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("explicit", {"solver": {"tol": 0.1}}, "an explicit model .* has no solver"),
        ("implicit", {"is_implicit": False}, "an explicit model .* has no solver"),
        ("implicit", {"dropout": 2.0}, r"dropout: 2.0 is not in \[0, 1\)"),
        ("implicit", {"head_dim": 7}, "head_dim: 7 does not divide"),
    ]
    for kind, fields, message in refused:
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / kind, **fields)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "implicit")
    for change, message in (
        (lambda: setattr(model, "solver", None), "solver: an implicit model needs one"),
        (lambda: setattr(model.config, "is_implicit", False), "is_implicit: fixed"),
        (lambda: setattr(make_model("mamba2", "explicit").config, "solver", {}), "an explicit model .* has no solver"),
    ):
        with pytest.raises(ValueError, match=message):
            change()


def test_sequential_forward_leaves_the_solver_that_another_thread_sees(make_model) -> None:
    model = make_model("mamba2", eval_mode="simultaneous", tol=1e-10, eval_max_iter=300)
    seen = set()
    model.base.register_forward_hook(lambda *_: seen.add(model.solver.eval_mode))
    worker = threading.Thread(target=implicit_llm.sequential_forward, args=(model, IDS))
    worker.start()
    worker.join()
    assert seen == {"simultaneous"}
    assert model(IDS, eval_mode="sequential").solver_stats.num_closing == 1


def test_the_namespace_is_its_public_names() -> None:
    assert dir(implicit_llm) == sorted(implicit_llm.__all__)


def test_the_lstm_reads_a_sequence_that_is_too_long_for_cudnn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it in float64, because a library may round products of other shapes otherwise."""
    config = LstmConfig(vocab_size=23, hidden_size=8)
    model, tokens = AutoModelForCausalLM.from_config(config).double(), torch.arange(22)[None]
    at_once, in_pieces = ConvergedStateCache(), ConvergedStateCache()
    expected = model(tokens, past_key_values=at_once).logits
    monkeypatch.setattr(lstm, "LONGEST", 8)
    torch.testing.assert_close(model(tokens, past_key_values=in_pieces).logits, expected, rtol=0, atol=1e-14)
    for state, whole in zip(in_pieces.prefix.layers[0], at_once.prefix.layers[0], strict=True):
        torch.testing.assert_close(state, whole, rtol=0, atol=1e-14)
