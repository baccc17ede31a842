"""Tools around transformers take our models as they are: Trainer, torch.compile, device maps, `fully_shard`.

Projections are modules of their own: hooks, adapters, parametrisations and quantised weights work on them.
"""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from implicit_llm import Projection  # registers the models, also in the processes
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import touched_module

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
        loss = model.train()(INPUT_IDS, labels=INPUT_IDS).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            logits = model.eval()(INPUT_IDS, attention_mask=mask).logits
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


class Halved(torch.Tensor):
    """A weight of half the value that products see, as a quantised weight is of another type than they see."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(args[0], 2 * args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


def _quantised(model: nn.Module, name: str) -> None:
    """A weight of another class, as torchao assigns one."""
    module = model.base.layers.get_submodule(name)
    module.weight = nn.Parameter(module.effective_weight().detach().as_subclass(Halved))


def _forwarded(model: nn.Module, name: str) -> None:
    module = model.base.layers.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


@pytest.mark.parametrize(
    ("kind", "change"),
    [*product(["explicit", "implicit"], [_parametrised, _replaced, _forwarded]), ("explicit", _quantised)],
)
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


def test_a_weight_that_is_computed_cannot_be_replaced_by_a_quantised_one(make_model, family: str) -> None:
    model = make_model(family)
    name = next(name for name in _leaves(model) if name.endswith(ADAPTED[family][0]))
    with pytest.raises(TypeError, match="computes its weight from g and v, so it cannot be quantised"):
        _quantised(model, name)
    module = model.base.layers.get_submodule(name)
    with pytest.raises(TypeError, match="change g and v"):
        module.weight = torch.zeros(module.shape)  # would not be used


class _PlainLinear(nn.Linear):
    """What the quantiser below puts in the place of a linear layer."""


@register_quantization_config("exact")
class ExactConfig(QuantizationConfigMixin):
    """The quantiser below. own: also replace subclasses of nn.Linear."""

    def __init__(self, own: bool = False, **kwargs: Any) -> None:
        self.quant_method, self.own = "exact", own


@register_quantizer("exact")
class ExactQuantizer(HfQuantizer):
    """Replaces linear layers before the weights are loaded, as bitsandbytes does: of the class nn.Linear alone."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for name, module in list(model.named_modules()):
            exact = type(module) is nn.Linear or (self.quantization_config.own and type(module) is Projection)
            if exact and name != "lm_head":
                shape = (module.in_features, module.out_features)
                model.set_submodule(name, _PlainLinear(*shape, bias=module.bias is not None, device="meta"))

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def test_a_quantiser_takes_effect_or_is_refused(make_model, family: str, tmp_path: Path) -> None:
    models = {kind: make_model(family, kind, dtype=torch.float32) for kind in ("explicit", "implicit")}
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind)
    load = AutoModelForCausalLM.from_pretrained
    for own in (False, True):
        with pytest.raises(ModelConfigError, match="quantization_config: exact cannot quantise an implicit model"):
            load(tmp_path / "implicit", quantization_config=ExactConfig(own))
    with pytest.raises(ModelConfigError, match="quantization_config: exact replaces no projection of Implicit"):
        load(tmp_path / "explicit", quantization_config=ExactConfig())
    quantised = load(tmp_path / "explicit", quantization_config=ExactConfig(own=True))
    assert any(isinstance(module, _PlainLinear) for module in quantised.modules())
    torch.testing.assert_close(quantised(INPUT_IDS).logits, models["explicit"](INPUT_IDS).logits)


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_torchs_dynamic_quantisation_which_finds_the_head_alone_is_refused(make_model, family: str, kind: str) -> None:
    with pytest.raises(ModelConfigError, match="only the head would be quantised; use torchao"):
        torch.ao.quantization.quantize_dynamic(make_model(family, kind, dtype=torch.float32), {nn.Linear})


TRAINED: dict[str, dict[str, Any]] = {"bounded": {"mode": "unrolled"}, "free": {}}
LAYERS: dict[str, Callable[[int], bool]] = {
    "all layers": lambda index: True,
    "the first layer": lambda index: index == 0,
}


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    model(INPUT_IDS, labels=INPUT_IDS).loss.backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}


def _wrap(model: nn.Module, impl: CheckpointImpl, wanted: Callable[[int], bool]) -> None:
    """As FSDP and accelerate checkpoint a model: each layer in a wrapper."""
    for index, layer in enumerate(model.base.layers):
        if wanted(index):
            model.base.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=impl)


def _enable(model: nn.Module, **how: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how or None)


def _replace_function(model: nn.Module) -> None:
    _enable(model)
    model.base._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)


def _train(model: nn.Module, **how: Any) -> None:
    """Let `Trainer` switch checkpointing on."""
    rows = [{"input_ids": row, "labels": row} for row in INPUT_IDS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, report_to=[], use_cpu=True, gradient_checkpointing=True,
            gradient_checkpointing_kwargs=how,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()


REENTRANT: dict[str, Callable[[Any], object]] = {
    "enabled": partial(_enable, use_reentrant=True),
    "Trainer": partial(_train, use_reentrant=True),
    "replaced function": _replace_function,
    **{name: partial(_wrap, impl=CheckpointImpl.REENTRANT, wanted=wanted) for name, wanted in LAYERS.items()},
}
NOT_REENTRANT: dict[str, Callable[[Any], object]] = {
    "enabled": _enable,
    **{name: partial(_wrap, impl=CheckpointImpl.NO_REENTRANT, wanted=wanted) for name, wanted in LAYERS.items()},
}


@pytest.mark.parametrize("phase", TRAINED)
@pytest.mark.parametrize("way", REENTRANT)
def test_reentrant_checkpointing_of_an_implicit_model_is_refused_by_name(make_model, family, phase, way) -> None:
    def train() -> None:
        model = make_model(family, num_hidden_layers=2, **TRAINED[phase]).train()
        REENTRANT[way](model)
        _gradients(model)

    with pytest.raises(ValueError, match=r"use_reentrant=True loses the gradients .*use_reentrant=False"):
        train()


def test_reentrant_checkpointing_with_an_adapter_is_refused_by_name(make_model, family: str) -> None:
    adapted = _adapted(make_model(family), family).train()
    _replace_function(adapted.base_model.model)
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradients"):
        _gradients(adapted)


@pytest.mark.parametrize("way", NOT_REENTRANT)
@pytest.mark.parametrize("kind", ["bounded", "free", "explicit"])
def test_checkpointing_changes_no_gradient(make_model, family: str, kind: str, way: str) -> None:
    def make() -> Any:
        made = "explicit" if kind == "explicit" else "implicit"
        return make_model(family, made, num_hidden_layers=2, **TRAINED.get(kind, {})).train()

    model, wanted = make(), _gradients(make())
    NOT_REENTRANT[way](model)
    found = _gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=0)


def test_reentrant_checkpointing_of_an_explicit_model_changes_no_gradient(make_model, family: str) -> None:
    model, wanted = (make_model(family, "explicit", num_hidden_layers=2).train() for _ in range(2))
    _enable(model, use_reentrant=True)
    torch.testing.assert_close(_gradients(model), _gradients(wanted), **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_explicit_pass_that_fills_a_cache_is_checkpointed_too(
    make_model, family: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return make_model(family, "explicit", num_hidden_layers=2).train()

    model, wanted, num_evaluations = make(), _gradients(make()), 0
    apply_stack = type(model.base).apply_stack

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_evaluations
        num_evaluations += 1
        return apply_stack(*args, **kwargs)

    monkeypatch.setattr(type(model.base), "apply_stack", counted)
    _enable(model, use_reentrant=reentrant)
    out = model(INPUT_IDS, labels=INPUT_IDS, use_cache=True)
    out.loss.backward()
    assert num_evaluations == 2  # the forward pass, and once more for the gradient
    assert out.past_key_values.get_seq_length() == INPUT_IDS.shape[1]
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, wanted, **CLOSE)


def test_checkpointing_only_some_layers_is_refused_since_the_stack_is_checkpointed_whole(make_model) -> None:
    model = make_model("mamba2")
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("before transformers 5.20 there is no such option")
    with pytest.raises(ValueError, match="every_n_layers: the whole layer stack"):
        model.activation_checkpointing_enable(every_n_layers=2)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_trainer_evaluates_and_predicts_the_logits_alone(make_model, tmp_path: Path, family: str, kind: str) -> None:
    model = make_model(family, kind, dtype=torch.float32)
    rows = torch.randint(0, 23, (5, 8))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=accuracy)
    expected = model(rows).logits
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx((expected.argmax(-1) == rows).double().mean().item())
    torch.testing.assert_close(torch.from_numpy(trainer.predict(data).predictions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.integration
def test_compiled_model_gives_the_same_logits(make_model, family: str) -> None:
    """Compiled by the backend that needs no C++ compiler: what is tested is that tracing keeps the numbers."""
    model = make_model(family, tol=1e-9, eval_max_iter=3, eval_mode="simultaneous")
    input_ids = torch.randint(0, 23, (2, 6))
    expected = model(input_ids).logits
    torch.testing.assert_close(torch.compile(model, backend="eager")(input_ids).logits, expected, atol=1e-8, rtol=1e-8)


@pytest.mark.integration
def test_a_compiled_model_trains_on_sequences_of_several_lengths(make_model, family: str) -> None:
    model = make_model(family, max_iter=3).train()
    compiled = torch.compile(model, backend="eager")
    for length in (12, 10, 7):
        rows = torch.randint(0, 23, (2, length))
        loss, expected = compiled(rows, labels=rows).loss, model(rows, labels=rows).loss
        torch.testing.assert_close(loss, expected, atol=1e-8, rtol=1e-8)
        loss.backward()


def test_a_device_map_loads_a_model(make_model, family: str, tmp_path: Path) -> None:
    model = make_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert mapped.dtype == torch.bfloat16
    assert mapped(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


IMPORTS = """
import sys, torch, implicit_llm
from implicit_llm.kernels import norm, selection
from implicit_llm.models.mamba2 import causal_conv, ssd
selection.select_kernels("torch")
x = torch.ones(1, 4, 8)
norm.rms_norm(x, None, torch.ones(8), 1e-5)
causal_conv.causal_conv(x, torch.ones(8, 4), None)
ssd.ssd(x[..., None], x, -torch.ones(8), x[:, :, None], x[:, :, None])
print(*sorted({name.split('.')[0] for name in sys.modules}))
"""


def test_the_library_and_its_torch_kernels_import_neither_other_kernels_nor_workflow_tools() -> None:
    """What `import implicit_llm` costs beyond transformers' own model classes is what it imports beyond them."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "implicit_llm" in loaded
    assert not loaded & {
        "mamba_ssm",
        "causal_conv1d",
        "snakemake",
        "mlflow",
        "datasets",
        "lm_eval",
        "matplotlib",
        "submitit",
    }


MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "llama3": {},
    "mamba2 with implicit gradient": {"gradient": "implicit", "gradient_tol": 1e-10},
    "mamba2 with series": {"gradient": "series"},
}
# Of these two batches the first takes more iterations, and its sequences stop apart.
BATCHES = (torch.randint(1, 23, (2, 8), generator=torch.Generator().manual_seed(0)), torch.full((2, 8), 3))


def _tokens(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None, pad_token_id=0)


def _sharded_passes(rank: int, folder: Path) -> None:
    """In each process and for each model: tokens of its batch, then gradients, which both processes sum up."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for layer in model.base.layers:
            fully_shard(layer)
        fully_shard(model)
        parameters = list(model.parameters())
        tokens = _tokens(model, BATCHES[rank])
        output = model.train()(BATCHES[rank], labels=BATCHES[rank])
        output.loss.backward()
        gradients = [parameter.grad.full_tensor() for parameter in parameters]
        torch.save((gradients, tokens, output.solver_stats.num_iter), folder / f"{name}-{rank}.pt")
    distributed.destroy_process_group()


def test_two_sharded_processes_give_the_gradients_and_tokens_of_one(make_model, tmp_path: Path) -> None:
    models = {
        name: make_model(name.split()[0], num_hidden_layers=2, tol=1e-6, max_iter=60, block_len=4, **settings)
        for name, settings in MODELS.items()
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    multiprocessing.set_forkserver_preload(["implicit_llm", "torch.distributed.fsdp"])  # imported once for both
    multiprocessing.start_processes(_sharded_passes, (tmp_path,), nprocs=2, start_method="forkserver")
    for name, model in models.items():
        found = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for ids, (_, tokens, num_iter) in zip(BATCHES, found, strict=True):
            assert torch.equal(tokens, _tokens(model, ids))
            output = model.train()(ids, labels=ids)
            (output.loss / 2).backward()
            assert torch.equal(num_iter, output.solver_stats.num_iter)
        assert not torch.equal(found[0][2], found[1][2])
        for got, parameter in zip(found[0][0], model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, atol=1e-12, rtol=1e-10)
