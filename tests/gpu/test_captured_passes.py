"""Test that training and evaluation from CUDA graphs equal the plain code, also over optimizer steps."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm import (
    GraphRunner,
    ImplicitLlama3Config,
    ImplicitMamba2Config,
    NonFiniteState,
    SolverConfig,
    trained_model,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.runner import Runner
from implicit_llm_contracts.plugins import load_plugin
from tests.pages import ROOT
from tests.unit.kernels.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SMALL = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2}
MAMBA = ImplicitMamba2Config(**SMALL, head_dim=64, state_size=128)
LLAMA = ImplicitLlama3Config(**SMALL, num_attention_heads=4, intermediate_size=192)
ONE_LAYER = ImplicitMamba2Config(vocab_size=97, hidden_size=128, num_hidden_layers=1, head_dim=64, state_size=128)
GROUPED = ImplicitLlama3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192)
EXPLICIT = ImplicitMamba2Config(**SMALL, head_dim=64, state_size=128, is_implicit=False)
DROPOUT = ImplicitMamba2Config(**SMALL, head_dim=64, state_size=128, dropout=0.2)
FREE = {"mode": "fixed_point", "max_iter": 20, "phantom_steps": 2, "tol": 0.01}
SERIES = FREE | {"phantom_steps": 4, "gradient": "series"}
CASES = {
    "explicit": (EXPLICIT, {}),
    "unrolled": (MAMBA, {"mode": "unrolled", "num_unroll": 3}),
    "free": (MAMBA, FREE),
    "blocks": (MAMBA, FREE | {"block_len": 16}),
    "dropout": (DROPOUT, FREE | {"block_len": 16}),
    "llama": (LLAMA, FREE),
    "llama-grouped": (GROUPED, FREE),
    "llama-blocks": (LLAMA, FREE | {"block_len": 16}),
    "series": (MAMBA, SERIES),
    "series with dropout": (DROPOUT, SERIES | {"block_len": 16}),
    "llama-series": (LLAMA, SERIES),
}


def _model(config: Any, solver: dict[str, Any], replays: bool, lr: float) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model in training mode and its optimizer; the next random numbers are those of the batches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).cuda().train()
    if model.solver is not None:
        model.solver = replace(model.solver, **solver)
    model.base.runner = GraphRunner(replays_training=replays)
    torch.manual_seed(1)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def _trained(config, solver: dict[str, Any], bf16: bool, replays: bool, return_logits: bool) -> tuple[list, list]:
    """Train for some steps; return the losses and the evaluations of f."""
    model, optimizer = _model(config, solver, replays, lr=1e-2)
    losses, iterations = [], []
    batches = [torch.randint(97, (64, 64), device="cuda") for _ in range(12)]
    for ids in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            out = model(input_ids=ids, labels=ids, aligned=True, return_logits=return_logits)
        (out.loss * 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        iterations.append(None if out.solver_stats is None else out.solver_stats.f_evaluations.mean().item())
        assert (out.logits is not None) == return_logits
    assert (model.base.runner.step is not None) == replays
    return losses, iterations


@pytest.mark.parametrize("return_logits", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_training_from_graphs_follows_the_plain_one(case: str, bf16: bool, return_logits: bool) -> None:
    config, solver = CASES[case]
    plain, plain_iterations = _trained(config, solver, bf16, False, return_logits)
    captured, captured_iterations = _trained(config, solver, bf16, True, return_logits)
    assert plain[-1] < 0.8 * plain[0]  # the loss falls, so a missed update would show
    assert captured == pytest.approx(plain, rel=0.02, abs=0.02)
    if plain_iterations[0] is not None:
        assert captured_iterations == pytest.approx(plain_iterations, rel=0.05)


PASSING = {
    "explicit": (EXPLICIT, {}),
    "unrolled": (MAMBA, {"mode": "unrolled", "num_unroll": 3}),
    "blocks": (MAMBA, FREE | {"block_len": 8}),
    "one layer": (ONE_LAYER, FREE | {"block_len": 8}),
}


def _passed_on(config: Any, solver: dict[str, Any], bf16: bool, replays: bool) -> tuple[list, list]:
    """Train on two chains of sequences in turn; return the losses and the norms of the states.

    Each step starts from the state at the end of its chain's last step.
    """
    model, optimizer = _model(config, solver, replays, lr=3e-3)
    ids = torch.randint(97, (2, 32, 32), device="cuda")
    caches, losses, states = (ConvergedStateCache(), ConvergedStateCache()), [], []
    for step in range(16):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            chain = {"input_ids": ids[step % 2], "past_key_values": caches[step % 2]}
            out = model(**chain, labels=ids[step % 2], aligned=True)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        states.append(out.past_key_values.prefix.layers[0][0].float().norm().item())
        assert caches[step % 2].get_seq_length() == 32 * (step // 2 + 1)
        assert not any(t.requires_grad for layer in caches[step % 2].prefix.layers for t in layer)
    assert (model.base.runner.step is not None) == replays
    return losses, states


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("case", PASSING)
def test_state_passing_from_graphs_follows_the_plain_one(case: str, bf16: bool) -> None:
    config, solver = PASSING[case]
    plain, captured = (_passed_on(config, solver, bf16, replays) for replays in (False, True))
    assert plain[0][-1] < 0.8 * plain[0][0]
    for mine, other in zip(captured, plain, strict=True):
        assert mine == pytest.approx(other, rel=0.03, abs=0.03)


@pytest.mark.parametrize("stop", ["token", "sequence"])
@pytest.mark.parametrize("batch", [4, 200, 384])
def test_a_layer_solved_at_once_follows_the_plain_blocks(batch: int, stop: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(trained_model("s5-state-passing-s0")).cuda().eval()
    model.solver, width = replace(model.solver, eval_stop=stop), model.solver.eval_block_len
    ids, found = torch.randint(120, (batch, 2, 4 * width), device="cuda"), []
    runner = model.base.runner
    for model.base.runner in (runner, Runner()):
        cache = ConvergedStateCache()
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            outs = [model.base(part, past_key_values=cache) for part in ids.unbind(1)]
        assert cache.get_seq_length() == 8 * width
        stats = outs[1].solver_stats
        assert stats.is_converged.all()  # because the model is trained
        found.append(((outs[1].last_hidden_state, *cache.prefix.layers[0]), stats.num_iter.mean().item()))
    assert not runner.sequences  # no graph was captured
    (mine, iterations), (plain, plain_iterations) = found
    for ours, other in zip(mine, plain, strict=True):
        assert relative_error(ours, other) < 0.05
    assert iterations == pytest.approx(plain_iterations, rel=0.03)
    assert iterations > 3


def test_a_model_in_bf16_keeps_its_dtype_where_a_layer_is_solved_at_once() -> None:
    model = AutoModelForCausalLM.from_config(ONE_LAYER).bfloat16().cuda().eval()
    model.solver = replace(model.solver, eval_block_len=8)
    with torch.inference_mode():
        out = model(torch.randint(97, (4, 32), device="cuda"))
    assert out.logits.dtype == out.last_hidden_state.dtype == torch.bfloat16


def test_a_state_that_is_not_finite_is_refused_by_a_layer_solved_at_once() -> None:
    model = AutoModelForCausalLM.from_config(ONE_LAYER).cuda().eval()
    model.solver = replace(model.solver, eval_block_len=8)
    embedding = model.get_input_embeddings()(torch.zeros(4, 32, dtype=torch.long, device="cuda")).detach()
    embedding[2, 19] = float("nan")
    bf16 = torch.autocast("cuda", dtype=torch.bfloat16)
    with pytest.raises(NonFiniteState, match="first seen at sequence 2"), torch.inference_mode(), bf16:
        model(inputs_embeds=embedding)


@pytest.mark.parametrize("bf16", [False, True])
def test_blockwise_evaluation_from_graphs_follows_the_plain_one(bf16: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MAMBA).cuda().eval()
    graphs = model.base.runner
    rough = replace(model.solver, eval_mode="blockwise", eval_block_len=16, tol=1e-2, eval_max_iter=60)
    fine = replace(rough, tol=1e-5, eval_max_iter=400)

    @torch.inference_mode()
    def evaluate(ids: torch.Tensor, solver: SolverConfig, *, bf16: bool) -> Any:
        model.solver = solver
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            return model(input_ids=ids)

    for _ in range(2):
        ids = torch.randint(97, (64, 128), device="cuda")
        model.base.runner = graphs
        captured = evaluate(ids, rough, bf16=bf16)
        model.base.runner = Runner()
        plain, exact = evaluate(ids, rough, bf16=bf16), evaluate(ids, fine, bf16=False)
        # Rounding and the order of sums must be small beside the error that the tolerance allows.
        assert relative_error(captured.logits, plain.logits) < 0.2 * relative_error(plain.logits, exact.logits)
        iterations = [found.solver_stats.num_iter.mean().item() for found in (captured, plain)]
        assert iterations[0] == pytest.approx(iterations[1], rel=0.1)
    assert [len(here.active_A) for here in graphs.sequences[False].open] == [64, 32, 16]


def test_a_family_whose_layers_call_their_modules_decodes_from_graphs() -> None:
    torch.manual_seed(0)
    gated = load_plugin(ROOT / "examples/extending/gated_rnn.py")
    model = AutoModelForCausalLM.from_config(gated.GatedRnnConfig(**SMALL)).cuda().eval()
    model.solver = replace(model.solver, tol=1e-4, eval_max_iter=60)
    graphs, ids = model.base.runner, torch.randint(97, (2, 24), device="cuda")

    @torch.inference_mode()
    def read() -> tuple[ConvergedStateCache, torch.Tensor]:
        cache, parts = ConvergedStateCache(), ids.split([8, *(1 for _ in range(16))], dim=1)
        return cache, torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)

    cache, captured = read()
    assert graphs.decoders[cache].graph is not None
    model.base.runner = Runner()
    assert relative_error(captured, read()[1]) < 1e-3
