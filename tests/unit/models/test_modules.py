"""Projections are modules of their own: hooks, adapters, parametrisations and quantised weights work on them."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

from implicit_llm.models.layers import Projection, touched_module

KINDS = pytest.mark.parametrize("kind", ["explicit", "implicit"])
ADAPTED = {"mamba2": ["in_proj", "out_proj"], "llama3": ["q_proj", "v_proj"]}
INPUT_IDS = torch.randint(1, 23, (2, 9), generator=torch.Generator().manual_seed(0))
CLOSE = {"atol": 1e-12, "rtol": 1e-10}


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute in a layer, by name."""
    return {name: module for name, module in model.base.layers.named_modules() if not list(module.children())}


def _adapted(model: nn.Module, family: str):
    """The model with LoRA whose product is not zero, as it would be at the beginning."""
    config = LoraConfig(r=2, target_modules=ADAPTED[family], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


@KINDS
def test_lora_computes_what_a_model_with_the_summed_weights_computes(make_model, family: str, kind: str) -> None:
    model, summed = make_model(family, kind, tol=1e-10), make_model(family, kind, tol=1e-10)
    adapted = _adapted(model, family)
    theirs = dict(adapted.base_model.model.named_modules())
    for name, module in list(summed.named_modules()):
        if isinstance(module, Projection):
            weight = module.effective_weight().detach()
            if name.endswith(tuple(ADAPTED[family])):
                weight = weight + theirs[name].get_delta_weight("default").detach()
            plain = Projection(module.shape, bias=module.bias is not None, weight_norm=False)
            plain.weight, plain.bias = nn.Parameter(weight), module.bias
            parent, _, child = name.rpartition(".")
            setattr(summed.get_submodule(parent), child, plain)
    torch.testing.assert_close(adapted(INPUT_IDS).logits, summed(INPUT_IDS).logits, atol=1e-8, rtol=1e-8)
    adapted.train()(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("safe_merge", [False, True])
def test_an_adapter_is_merged_into_plain_weights_and_refused_by_normalised_ones(make_model, family, safe_merge) -> None:
    adapted = _adapted(make_model(family, "explicit"), family)
    expected = adapted(INPUT_IDS).logits
    merged = adapted.merge_and_unload(safe_merge=safe_merge)
    torch.testing.assert_close(merged(INPUT_IDS).logits, expected, **CLOSE)
    assert not merged.base.calls_modules()
    with pytest.raises(TypeError, match=r"weight-normalised projection; keep it unmerged$"):
        _adapted(make_model(family), family).merge_and_unload(safe_merge=safe_merge)


@KINDS
def test_hooks_fire_in_every_iteration_on_every_module_of_a_layer(make_model, family: str, kind: str) -> None:
    model = make_model(family, kind, num_hidden_layers=2, mode="unrolled", num_unroll=3).train()
    calls: dict[str, int] = dict.fromkeys(_leaves(model), 0)
    for name, module in _leaves(model).items():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    model(INPUT_IDS)
    assert set(calls.values()) == {3 if kind == "implicit" else 1}


@KINDS
def test_modules_called_one_by_one_compute_what_fused_products_do(make_model, family, kind, caplog) -> None:
    """Logits, generated tokens and gradients; and the log says once which module is in the way."""
    mask = torch.ones_like(INPUT_IDS)
    mask[0, :3] = 0

    def results(model):
        model.zero_grad()
        model.train()(INPUT_IDS, labels=INPUT_IDS).loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        with torch.no_grad():
            model.eval()
            logits = model(INPUT_IDS, attention_mask=mask).logits
            tokens = model.generate(INPUT_IDS, attention_mask=mask, max_new_tokens=4, pad_token_id=0)
            return logits, tokens, gradients

    model = make_model(family, kind, num_hidden_layers=2, tol=1e-9)
    expected = results(model)
    assert not caplog.records
    name = f"layers.1.{'mixer' if family == 'mamba2' else 'self_attn'}.{ADAPTED[family][1]}"
    for layer in model.base.layers:
        handle = layer.get_submodule(name.removeprefix("layers.1.")).register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="implicit_llm"):
        torch.testing.assert_close(results(model), expected, **CLOSE)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("implicit_llm")]
    assert said.startswith(name)
    assert model.base.calls_modules()
    handle.remove()


def _parametrised(model: nn.Module, name: str) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    module = model.base.layers.get_submodule(name)
    parametrize.register_parametrization(module, "g" if module.is_normed else "weight", Doubled())


def _replaced(model: nn.Module, name: str) -> None:
    """Another class in its place, as quantisers put one there."""
    weight = 2 * model.base.layers.get_submodule(name).effective_weight().detach()
    linear = nn.Linear(*weight.T.shape, bias=False)
    linear.weight = nn.Parameter(weight)
    parent, _, child = name.rpartition(".")
    setattr(model.base.layers.get_submodule(parent), child, linear)


def _forwarded(model: nn.Module, name: str) -> None:
    module = model.base.layers.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


@KINDS
@pytest.mark.parametrize("change", [_parametrised, _replaced, _forwarded])
def test_what_is_put_in_a_projections_place_takes_effect(make_model, family, kind, change) -> None:
    """Each change doubles a projection."""
    model, doubled = make_model(family, kind, tol=1e-10), make_model(family, kind, tol=1e-10)
    name = next(name for name in _leaves(model) if name.endswith(ADAPTED[family][0]))
    module = doubled.base.layers.get_submodule(name)
    with torch.no_grad():
        (module.g if module.is_normed else module.weight).mul_(2)
    change(model, name)
    assert touched_module(model.base.layers.get_submodule(name)) is not None
    torch.testing.assert_close(model(INPUT_IDS).logits, doubled(INPUT_IDS).logits, atol=1e-8, rtol=1e-8)
