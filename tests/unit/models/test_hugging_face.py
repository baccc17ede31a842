"""What a user of transformers expects of a causal language model works with ours."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import implicit_llm
from implicit_llm.models.errors import ModelConfigError

KINDS = pytest.mark.parametrize("kind", ["implicit", "explicit"])
SOLVED = {"tol": 1e-10, "eval_max_iter": 300}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("kind", ["implicit", "unrolled", "explicit"])
def test_every_way_of_greedy_generation_repeats_what_single_forward_passes_choose(
    make_model, family: str, kind: str
) -> None:
    """With a cache and without, by chunks, from embeddings, and in train mode, which stays as it was."""
    model = make_model(family, "explicit") if kind == "explicit" else make_model(family, **SOLVED)
    if kind == "unrolled":
        model.solver = replace(model.solver, mode="unrolled")
    input_ids = by_hand = torch.randint(1, 23, (2, 5))
    for _ in range(5):
        by_hand = torch.cat([by_hand, model(by_hand).logits[:, -1:].argmax(-1)], dim=1)
    settings = GREEDY | {"max_new_tokens": 5}
    embeddings = model.get_input_embeddings()(input_ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **settings), by_hand[:, 5:])
    model.train()
    model.base.layers[0].eval()
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        assert torch.equal(model.generate(input_ids, **options, **settings), by_hand)
    assert (model.training, model.base.training, model.base.layers[0].training) == (True, True, False)


@KINDS
def test_in_fp64_losses_and_finite_differences_are_in_fp64(make_model, family: str, kind: str) -> None:
    """Also what does not depend on the weights: the loss function and the rotary tables."""
    model = make_model(family, kind, mode="unrolled", num_unroll=2).train()
    input_ids, direction = torch.randint(0, 23, (2, 7)), torch.randn(2, 7, 16, dtype=torch.float64)
    embedding = model.get_input_embeddings()(input_ids).detach().requires_grad_()
    for options in ({}, {"aligned": True}, {"return_logits": False}):
        (gradient,) = torch.autograd.grad(model(inputs_embeds=embedding, labels=input_ids, **options).loss, embedding)
        moved = [
            model(inputs_embeds=embedding + eps * direction, labels=input_ids, **options).loss for eps in (1e-6, -1e-6)
        ]
        torch.testing.assert_close((moved[0] - moved[1]) / 2e-6, (gradient * direction).sum(), atol=1e-9, rtol=1e-7)


@KINDS
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, r"input_ids .* at least one token; got shape \(2, 0\)"),
        ({"input_ids": torch.ones(0, 5, dtype=torch.long)}, r"input_ids .* at least one token; got shape \(0, 5\)"),
        ({"input_ids": torch.ones(5, dtype=torch.long)}, r"input_ids must be \(batch, length\)"),
        ({"inputs_embeds": torch.ones(5, 16)}, r"inputs_embeds must be \(batch, length, width\)"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be .*\(1, 5\), 0 where padding; got \(1, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask must be"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, "packed documents .* attention_mask"),
        ({"position_ids": torch.tensor([[3]])}, r"position_ids must have the shape \(1, 5\)"),
    ],
)
def test_inputs_that_mean_nothing_are_refused(make_model, family: str, kind: str, inputs, message: str) -> None:
    model = make_model(family, kind)
    if len(inputs) == 1 and "input" not in next(iter(inputs)):
        inputs = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]])} | inputs
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_beams_with_a_cache_equal_beams_without(make_model, family: str) -> None:
    model = make_model(family, **SOLVED)
    input_ids = torch.randint(1, 23, (2, 4))
    found = [model.generate(input_ids, **GREEDY, max_new_tokens=5, num_beams=3, use_cache=use) for use in (True, False)]
    assert torch.equal(*found)


def test_a_saved_model_brings_the_module_that_loads_it_and_a_card(make_model, family: str, tmp_path: Path) -> None:
    model = make_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    module = runpy.run_path(str(tmp_path / "modeling_implicit.py"))
    auto_map = AutoConfig.from_pretrained(tmp_path).auto_map
    found = [module[name.removeprefix("modeling_implicit.")] for name in auto_map.values()]
    assert found == [type(model.config), type(model.base), type(model)]
    assert ModelCard((tmp_path / "README.md").read_text()).data.library_name == "transformers"
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@KINDS
@pytest.mark.parametrize("is_aligned", [True, False])
def test_the_loss_is_over_shifted_labels_and_aligned_ones_on_request_with_and_without_logits(
    make_model, family: str, kind: str, is_aligned: bool
) -> None:
    model = make_model(family, kind, mode="unrolled").train()
    input_ids, labels = torch.randint(0, 23, (2, 2, 9))
    labels[:, 3] = -100
    logits, shift = model(input_ids).logits, 0 if is_aligned else 1
    loss = cross_entropy(logits[:, : 9 - shift].flatten(0, 1), labels[:, shift:].flatten())
    expected = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for return_logits in (True, False):
        out = model(input_ids, labels=labels, aligned=is_aligned, return_logits=return_logits)
        assert (out.logits is None) == (not return_logits)
        found = [out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class _OtherHead(nn.Linear):
    def __init__(self, *sizes: int, bias: bool) -> None:
        super().__init__(*sizes, bias=bias)
        self.added = nn.Linear(*sizes, bias=bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.added(input)


@KINDS
@pytest.mark.parametrize("what", ["hook", "bias", "class"])
def test_the_loss_without_logits_is_that_of_a_head_that_is_more_than_its_weight(
    make_model, family: str, kind: str, what: str
) -> None:
    model = make_model(family, kind, mode="unrolled").train()
    assert not model.calls_head
    if what == "hook":
        model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    else:
        model.lm_head = (_OtherHead if what == "class" else nn.Linear)(16, 23, bias=what == "bias")
        model.to(model.base.dtype)
    assert model.calls_head
    input_ids = torch.randint(0, 23, (2, 9))
    found = []
    for return_logits in (True, False):
        out = model(input_ids, labels=input_ids, return_logits=return_logits)
        assert (out.logits is None) == (not return_logits)
        found.append([out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_a_loss_can_be_of_the_logits_that_are_kept_and_a_sum_divided_by_a_given_number(make_model, family: str) -> None:
    model, input_ids = make_model(family, "explicit"), torch.randint(1, 23, (2, 7))
    logits, output = model(input_ids).logits, model(input_ids, labels=input_ids[:, -3:], logits_to_keep=3)
    torch.testing.assert_close(output.logits, logits[:, -3:])
    torch.testing.assert_close(output.loss, cross_entropy(logits[:, -3:-1].flatten(0, 1), input_ids[:, -2:].flatten()))
    loss = model(input_ids, labels=input_ids, aligned=True, return_logits=False, num_items_in_batch=1).loss
    torch.testing.assert_close(loss, cross_entropy(logits.flatten(0, 1), input_ids.flatten(), reduction="sum"))


def test_embeddings_are_resized_with_their_tie_and_hidden_states_are_those_of_explicit_models(
    make_model, family: str
) -> None:
    model, explicit = make_model(family), make_model(family, "explicit", num_hidden_layers=2)
    model.resize_token_embeddings(31)
    input_ids = torch.tensor([[30, 1]])
    assert model(input_ids).logits.shape == (1, 2, 31)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert len(explicit(input_ids % 23, output_hidden_states=True).hidden_states) == 3
    with pytest.raises(ValueError, match="last_hidden_state"):
        model(input_ids, output_hidden_states=True)
    for it in (model, explicit):
        it.config.output_hidden_states = True
    assert len(explicit(input_ids % 23).hidden_states) == 3
    assert explicit(input_ids % 23, output_hidden_states=False).hidden_states is None
    with pytest.raises(ValueError, match="last_hidden_state"):
        model(input_ids)


def test_an_explicit_model_becomes_implicit_with_its_layers(make_model, family: str) -> None:
    explicit = make_model(family, "explicit", num_hidden_layers=2)
    for part in explicit.modules():
        if hasattr(part, "effective_weight"):
            torch.nn.init.zeros_(part.weight[1:3])  # rows of padding
    implicit = implicit_llm.to_implicit(explicit, solver=implicit_llm.SolverConfig(mode="unrolled")).train()
    assert implicit.solver.mode == "unrolled"
    theirs, ours = (
        {name: part.effective_weight() for name, part in model.named_modules() if hasattr(part, "effective_weight")}
        for model in (explicit, implicit)
    )
    assert len(theirs) >= 6
    torch.testing.assert_close({name: ours[name] for name in theirs}, theirs)
    input_ids = torch.tensor([[3, 1, 2]])
    implicit(input_ids, labels=input_ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in implicit.parameters())
    with pytest.raises(ValueError, match="already"):
        implicit_llm.to_implicit(implicit)


def test_a_model_in_low_precision_trains(make_model) -> None:
    model, input_ids = make_model("mamba2", dtype=torch.bfloat16).train(), torch.randint(0, 23, (2, 9))
    model(input_ids, labels=input_ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@KINDS
def test_drafted_decoding_equals_greedy_for_llama_and_is_refused_for_mamba2(make_model, kind: str) -> None:
    model, draft = make_model("llama3", kind, **SOLVED), make_model("llama3", "explicit")
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    settings = GREEDY | {"max_new_tokens": 9}
    greedy = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **settings), greedy)
    assert torch.equal(model.generate(prompt, assistant_model=draft, **settings), greedy)
    recurrent = make_model("mamba2", kind)
    with pytest.raises(ValueError, match="stateful models, such as ImplicitMamba2ForCausalLM"):
        recurrent.generate(prompt, prompt_lookup_num_tokens=3, **settings)


@KINDS
def test_a_cropped_cache_goes_on_as_if_the_last_tokens_had_not_been(make_model, kind: str) -> None:
    model = make_model("llama3", kind, **SOLVED)
    input_ids = torch.randint(1, 23, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for tokens in (-2, 5):  # so many forgotten, so many kept
        cache = model(input_ids, attention_mask=mask, use_cache=True).past_key_values
        cache.crop(tokens)
        assert cache.get_seq_length() == 5
        again = model(input_ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(again, model(input_ids, attention_mask=mask).logits[:, 5:], atol=1e-7, rtol=1e-7)
    for tokens in (-8, 8):
        with pytest.raises(ValueError, match=f"^past_key_values: the cache holds 7 tokens .* by {tokens}$"):
            cache.crop(tokens)
    recurrent = make_model("mamba2", kind)(input_ids, use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match=r"implicit_mamba2 .* cannot forget its last tokens"):
        recurrent.crop(-1)


@pytest.mark.parametrize(
    ("name", "field", "hint"),
    [
        ("mamba2-130-implicit", "tol", "did you mean 'mamba2-130m-implicit'?"),
        ("gpt", "tol", "implicit_llm.list_configs() names them all"),
        ("mamba2-130m-implicit", "hiden_size", "did you mean 'hidden_size'?"),
        ("mamba2-130m-implicit", "qqq", "its fields are "),
    ],
)
def test_a_configuration_or_a_field_that_is_not_there_is_refused_with_what_is(name: str, field: str, hint: str) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(f"; {hint}")):
        implicit_llm.load_config(name, **{field: 1})


def test_every_named_configuration_is_a_directory_auto_config_reads() -> None:
    names = implicit_llm.list_configs()
    assert {f"{size}-{kind}" for size in COUNTS_MILLION for kind in ("explicit", "pretrain", "implicit")} <= set(names)
    for name in names:
        read = AutoConfig.from_pretrained(Path(implicit_llm.__file__).parent / "configs" / name).to_dict()
        expected = implicit_llm.load_config(name).to_dict()
        assert read | {"_name_or_path": ""} == expected | {"_name_or_path": ""}


def test_named_configurations_and_packaged_models_are_evaluated_until_each_token_of_a_block_has_converged() -> None:
    configs = [name for name in implicit_llm.list_configs() if not name.endswith("explicit")]
    models = ["a5-monoid-published-s0", "a5-monoid-released-s0", "catbabi-implicit-s0", "s5-state-passing-s0"]
    solvers = {name: implicit_llm.load_config(name).solver for name in configs}
    solvers |= {name: AutoConfig.from_pretrained(implicit_llm.trained_model(name)).solver for name in models}
    for name, solver in solvers.items():
        block_len = 8 if "state-tracking" in name or name in models else 256
        assert (solver.eval_mode, solver.eval_stop, solver.eval_block_len) == ("blockwise", "token", block_len)
    assert len(configs) == 17


def test_a_saved_model_names_all_its_settings_and_keeps_them_when_a_default_changes(make_model, tmp_path: Path) -> None:
    model = make_model("mamba2")
    model.solver = implicit_llm.SolverConfig()
    model.save_pretrained(tmp_path / "default")
    saved = json.loads((tmp_path / "default" / "config.json").read_text())["solver"]
    assert saved == implicit_llm.SolverConfig().to_dict()
    model.solver = implicit_llm.SolverConfig(eval_stop="sequence")
    model.save_pretrained(tmp_path / "other")
    assert AutoConfig.from_pretrained(tmp_path / "other").solver.eval_stop == "sequence"


COUNTS_MILLION = {
    "mamba2-130m": 131.6, "mamba2-370m": 372.8, "mamba2-760m": 790.1, "mamba2-1.3b": 1361.2,
    "llama3-130m": 125.3, "llama3-370m": 356.6, "llama3-760m": 763.9, "llama3-1.3b": 1323.6,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS_MILLION)
def test_parameter_counts_are_those_of_the_paper(name: str) -> None:
    """Counted as the paper counts: embedding tied, injection included, without the norms of weight normalisation."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(implicit_llm.load_config(f"{name}-implicit"))
    count = sum(p.numel() for key, p in model.named_parameters() if not key.endswith(".g"))
    assert count / 1e6 == pytest.approx(COUNTS_MILLION[name], abs=0.06)


@pytest.mark.parametrize("phase", ["train", "eval"])
@KINDS
def test_each_part_of_a_sequence_has_a_backward_pass_of_its_own(make_model, family: str, kind: str, phase: str) -> None:
    model = make_model(family, kind).train(phase == "train")
    cache = None
    for ids in torch.randint(1, 23, (2, 9)).split(3, dim=1):
        out = model(ids, labels=ids, past_key_values=cache, use_cache=True)
        out.loss.backward()
        cache = out.past_key_values
        assert not any(state.requires_grad for layer in cache.prefix.layers for state in layer)
    assert cache is not None
    assert cache.get_seq_length() == 9


@KINDS
def test_sampling_with_a_cache_equals_sampling_without_and_a_streamer_gets_each_token(make_model, family, kind) -> None:
    model = make_model(family, kind, **({} if kind == "explicit" else SOLVED))
    ids, tokens = torch.randint(1, 23, (1, 5)), {}

    streamer = Mock(spec=BaseStreamer)
    for use_cache in (True, False):
        torch.manual_seed(1)
        how = {"do_sample": True, "use_cache": use_cache, "streamer": streamer if use_cache else None}
        tokens[use_cache] = model.generate(ids, max_new_tokens=6, **GREEDY | how)[0].tolist()
    put = torch.cat([call.args[0].flatten() for call in streamer.put.call_args_list])
    assert tokens[True] == tokens[False] == put.tolist()


def test_a_pass_in_train_mode_draws_one_dropout_mask_for_all_its_iterations(make_model, family: str) -> None:
    model = make_model(family, num_unroll=5, mode="unrolled")
    model.config.dropout = 0.5
    dropped: list[torch.Tensor] = []

    def look(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        # What the mixer adds is still apart; what attention adds is in the sum.
        dropped.append(output[1] == 0 if family == "mamba2" else output[0] == inputs[0])

    model.base.layers[0].register_forward_hook(look)
    ids = torch.randint(1, 23, (2, 9))
    model.train()(ids)
    first, *others = dropped
    assert len(others) == 4
    assert 0.3 < first.float().mean() < 0.7
    assert all(torch.equal(first, other) for other in others)
    dropped.clear()
    model(ids)
    assert not torch.equal(first, dropped[0])
    dropped.clear()
    model.eval()(ids)
    assert not any(zero.any() for zero in dropped)
