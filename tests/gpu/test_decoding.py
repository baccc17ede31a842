"""Test that a stack evaluated on one token in a few kernels per layer equals the plain one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm import ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.kernels.selection import kernels
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.runner import Runner
from implicit_llm.models.stack import Prefix, StackInput
from tests.unit.kernels.reference import DEVICE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "state_size": 16}
ODD = {"hidden_size": 56, "num_hidden_layers": 3, "head_dim": 16, "state_size": 32, "expand": 4, "n_groups": 2}
NARROW = {"hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16, "state_size": 16, "conv_kernel": 2}
FULL = {"hidden_size": 768, "num_hidden_layers": 24}
TWO = FULL | {"num_hidden_layers": 2}
WIDE = {"hidden_size": 2048, "num_hidden_layers": 2}
LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
LLAMA_ODD = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 41}
LLAMA_FULL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
LLAMA_TWO = LLAMA_FULL | {"num_hidden_layers": 2}
SIZES = {"small": SMALL, "odd": ODD, "narrow": NARROW, "two": TWO, "full": FULL, "wide": WIDE}
LLAMAS = {"llama": LLAMA, "llama-odd": LLAMA_ODD, "llama-two": LLAMA_TWO, "llama-full": LLAMA_FULL}
POSITION, ROOM = 5, 12


def model_of(sizes: str, **changes: Any) -> Any:
    """Return a model whose norms have random weights."""
    torch.manual_seed(0)
    options = {"vocab_size": 97} | (SIZES | LLAMAS)[sizes] | changes
    config = (ImplicitLlama3Config if sizes in LLAMAS else ImplicitMamba2Config)(**options)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.to(DEVICE).eval()


def token_input(model: Any, batch: int = 1) -> tuple[torch.Tensor, StackInput]:
    """Return a random z and the input of one token of each sequence after random states."""
    base, config = model.base, model.config
    if base.has_growing_state:
        heads = config.num_attention_heads
        shapes = [(batch, heads, ROOM, config.hidden_size // heads)] * 2
    else:
        mixer, kept = base.layers[0].mixer, config.conv_kernel - 1
        shapes = [(batch, mixer.heads, mixer.head_dim, mixer.state_size), (batch, kept, mixer.conv_channels)]
    states = tuple(tuple(torch.randn(shape).to(DEVICE) for shape in shapes) for _ in base.layers)
    prefix = Prefix(states, POSITION)
    if base.has_growing_state:
        prefix = replace(prefix, room=ROOM, position=torch.tensor([POSITION], device=DEVICE))
    embedding, z = torch.randn(2, batch, 1, config.hidden_size).to(DEVICE)
    return z, base.stack_input(embedding, None, None, prefix)


@torch.no_grad()
def check_stack(sizes: str) -> None:
    """Compare a stack in a few kernels per layer with the plain one, although products in TF32 are allowed."""
    torch.set_float32_matmul_precision("high")
    model = model_of(sizes)
    z, x = token_input(model)
    apply = model.base.token_stack(x.weights)
    assert apply is not None
    found = apply(z, replace(x, prefix=x.prefix.map(torch.clone)))  # Llama writes keys and values
    torch.set_float32_matmul_precision("highest")
    with kernels("torch"):
        expected = model.base.apply_stack(z, x)[0]
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-5
    assert relative_error(found, z) > 0.1


@pytest.mark.parametrize("sizes", ["small", "odd", "narrow", "full", "wide", "llama", "llama-odd", "llama-full"])
def test_a_stack_in_a_few_kernels_per_layer_equals_the_plain_one(sizes: str) -> None:
    check_stack(sizes)


@pytest.mark.parametrize("sizes", ["full", "llama-full"])
@torch.no_grad()
def test_a_captured_stack_gives_the_same_bits_in_every_replay(sizes: str) -> None:
    model = model_of(sizes)
    z, x = token_input(model)
    apply = model.base.token_stack(x.weights)
    found = apply(z, x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = apply(z, x)
    for _ in range(50):  # a kernel that started too early would read what the kernel before it has not yet written
        again.zero_()
        graph.replay()
        assert torch.equal(again, found)


@pytest.mark.parametrize(
    ("sizes", "batch"), [("full", 1), ("small", 3), ("full", 64), ("llama-full", 1), ("llama", 3), ("llama-full", 64)]
)
@torch.inference_mode()
def test_tokens_from_graphs_equal_those_of_the_plain_code(sizes: str, batch: int) -> None:
    torch.set_float32_matmul_precision("highest")
    model = model_of(sizes)
    model.solver = replace(model.solver, tol=1e-3, eval_max_iter=60)
    prompt, tokens = torch.randint(97, (batch, 9)).to(DEVICE), torch.randint(97, (batch, 24)).to(DEVICE)

    def logits() -> tuple[torch.Tensor, torch.Tensor, ConvergedStateCache]:
        cache, found, evaluations = ConvergedStateCache(), [], []
        model(input_ids=prompt, past_key_values=cache)
        for token in tokens.split(1, dim=1):
            out = model(input_ids=token, past_key_values=cache)
            found.append(out.logits)
            evaluations.append(out.solver_stats.f_evaluations)
        return torch.cat(found, dim=1), torch.stack(evaluations), cache

    replayed, evaluations, cache = logits()
    graph = model.base.runner.decoders[cache].graph
    assert graph is not None
    assert (graph._token_stack is not None) == (batch == 1)
    model.base.runner = Runner()
    plain, plain_evaluations, _ = logits()
    assert relative_error(replayed, plain) < 0.01
    assert (replayed.argmax(-1) == plain.argmax(-1)).float().mean() > 0.95
    assert (evaluations - plain_evaluations).abs().mean() < 0.5  # rounding may change a number by one
