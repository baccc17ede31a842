"""The counted operations against those that PyTorch sees, and against 6 N for each token."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from implicit_llm import (
    ImplicitLlama3Config,
    ImplicitLlama3ForCausalLM,
    ImplicitMamba2Config,
    ImplicitMamba2ForCausalLM,
    load_config,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm_contracts.config import flops

BATCH, WIDTH, LAYERS, INNER, STATE = 2, 32, 2, 64, 8
SOLVERS: dict[str, dict[str, Any]] = {
    "unrolled": {"mode": "unrolled", "num_unroll": 3},
    "free": {"mode": "fixed_point", "max_iter": 5, "tol": 1e-9, "phantom_steps": 2},
    "free, by blocks": {"mode": "fixed_point", "max_iter": 5, "tol": 1e-9, "phantom_steps": 2, "block_len": 8},
    "free, series": {"mode": "fixed_point", "max_iter": 5, "tol": 1e-9, "phantom_steps": 4, "gradient": "series"},
}


SIZES = {"vocab_size": 97, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
ATTENTION = {"num_attention_heads": 4, "intermediate_size": 56}
GROUPED = {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False}


def llama(solver: dict[str, Any] | None, **changes: Any) -> PreTrainedModel:
    fields = {**SIZES, **ATTENTION, **changes}
    return ImplicitLlama3ForCausalLM(
        ImplicitLlama3Config(**fields, is_implicit=solver is not None, solver=solver)
    ).train()


def grouped(solver: dict[str, Any] | None) -> PreTrainedModel:
    return llama(solver, **GROUPED)


def mamba(solver: dict[str, Any] | None) -> PreTrainedModel:
    config = ImplicitMamba2Config(
        **SIZES, expand=2, head_dim=16, state_size=STATE, is_implicit=solver is not None, solver=solver
    )
    return ImplicitMamba2ForCausalLM(config).train()


def counted(model: PreTrainedModel, length: int, *, backward: bool) -> float:
    """FLOPs per token that PyTorch sees; attention as the matrix products it consists of."""
    ids_BL = torch.randint(0, 97, (BATCH, length))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            model(ids_BL, labels=ids_BL)
        total = counter.get_total_flops()
        if backward:  # of another pass, since the hooks of a counted one refuse the products of a series
            loss = model(ids_BL, labels=ids_BL).loss
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            total += counter.get_total_flops()
    return total / (BATCH * length)


def masked_attention(length: int, width: int = WIDTH) -> float:
    """What the products compute and the causal mask throws away: (L-1)/2 scores and values a token and layer."""
    return LAYERS * 4 * width * (length - 1) / 2


@pytest.mark.parametrize("length", [1, 24, 100])
@pytest.mark.parametrize(("family", "width"), [(llama, WIDTH), (grouped, 4 * 12)])
def test_an_explicit_llama_costs_what_its_matrix_products_do(length: int, family: Any, width: int) -> None:
    model = family(None)
    forward = flops.forward_flops(model.config.to_dict(), length)
    masked = masked_attention(length, width)
    assert counted(model, length, backward=False) == forward.stack + forward.outside + masked
    training = flops.training_flops(model.config.to_dict(), length, None, None)
    assert counted(model, length, backward=True) == training + 3 * masked


@pytest.mark.parametrize("length", [24, 64, 128, 320])
def test_an_explicit_mamba2_costs_what_its_scan_by_chunks_does(length: int) -> None:
    model = mamba(None)
    forward = flops.forward_flops(model.config.to_dict(), length)
    chunks = -(-length // flops.SSD_CHUNK_LEN)
    masked = LAYERS * (length / chunks - 1) / 2 * 2 * (STATE + INNER)
    # The kernel reads the empty state before the first chunk, and makes the one after the last.
    unneeded = LAYERS * 4 * STATE * INNER / chunks if chunks > 1 else 0
    assert counted(model, length, backward=False) == pytest.approx(forward.stack + forward.outside + masked + unneeded)


def test_an_unrolled_llama_costs_three_forwards_for_each_iteration() -> None:
    model, solver, length = llama(SOLVERS["unrolled"]), SOLVERS["unrolled"], 24
    training = flops.training_flops(model.config.to_dict(), length, solver, None)
    assert counted(model, length, backward=True) == training + 3 * 3 * masked_attention(length)


def test_the_iterations_of_the_solver_cost_a_forward_each() -> None:
    model, length = llama(SOLVERS["free"]), 24
    fields = model.config.to_dict()
    forward = flops.forward_flops(fields, length)
    training = flops.training_flops(fields, length, SOLVERS["free"], None)
    assert training == (5 + 3 * 2) * forward.stack + 3 * forward.outside
    assert counted(model, length, backward=True) == training + (5 + 3 * 2) * masked_attention(length)
    assert flops.training_flops(fields, length, SOLVERS["free"], 4.5) == training - 2.5 * forward.stack


def test_a_series_costs_one_backward_pass_and_products_that_need_no_gradient_of_a_weight() -> None:
    model, solver, length = llama(SOLVERS["free, series"]), SOLVERS["free, series"], 24
    fields = model.config.to_dict()
    forward = flops.forward_flops(fields, length)
    training = flops.training_flops(fields, length, solver, None)
    assert training == (5 + 4 + 2 + 3) * forward.stack + 3 * forward.mixing + 3 * forward.outside
    assert counted(model, length, backward=True) == training + (5 + 4 + 2 + 3 * 2) * masked_attention(length)
    with pytest.raises(ValueError, match="less than the 4"):
        flops.training_flops(fields, length, solver, 3.0)


@pytest.mark.parametrize("passes_states", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_most_evaluations_are_those_of_a_solver_that_never_converges(
    name: str, passes_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, num_tokens = mamba(SOLVERS[name]), 0
    apply_stack = model.base.apply_stack

    def count(h_BLD: torch.Tensor, *given: Any, **options: Any) -> Any:
        nonlocal num_tokens
        num_tokens += h_BLD[..., 0].numel()
        return apply_stack(h_BLD, *given, **options)

    monkeypatch.setattr(model.base, "apply_stack", count)
    ids_BL = torch.randint(0, 97, (BATCH, 32))
    stats = model(ids_BL, past_key_values=ConvergedStateCache() if passes_states else None).solver_stats
    most = flops.max_evaluations(SOLVERS[name], passes_states=passes_states)
    assert float(stats.f_evaluations.mean()) == num_tokens / ids_BL.numel() == most


@pytest.mark.parametrize("solver", [None, SOLVERS["free"]])
@pytest.mark.parametrize("family", [llama, grouped, mamba])
def test_parameters_are_counted_exactly(family: Any, solver: dict[str, Any] | None) -> None:
    model = family(solver)
    assert flops.num_parameters(model.config.to_dict()) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("size", ["130m", "370m", "760m", "1.3b"])
@pytest.mark.parametrize("family", ["mamba2", "llama3"])
def test_a_short_step_of_a_published_size_costs_six_flops_a_parameter(family: str, size: str) -> None:
    fields = load_config(f"{family}-{size}-explicit").to_dict()
    per_token = flops.training_flops(fields, 64, None, None)
    assert per_token == pytest.approx(6 * flops.num_parameters(fields), rel=0.01)


def test_the_widened_mlp_counts_at_its_published_width() -> None:
    fields = load_config("llama3-1.3b-explicit").to_dict()
    assert fields["intermediate_size"] == 5461
    wider = flops.forward_flops({**fields, "intermediate_size": 5462}, 2048).stack
    assert wider - flops.forward_flops(fields, 2048).stack == 24 * 6 * 2048


def test_another_model_counts_by_its_parameters() -> None:
    assert flops.training_flops({"model_type": "gpt2", "num_parameters": 1000}, 64, None, None) == 6000
    with pytest.raises(flops.UncountedModel, match=r"'gpt2'.*give num_parameters"):
        flops.forward_flops({"model_type": "gpt2"}, 64)


def test_impossible_evaluations_are_refused() -> None:
    fields = mamba(SOLVERS["free"]).config.to_dict()
    with pytest.raises(ValueError, match="less than the 2"):
        flops.training_flops(fields, 64, SOLVERS["free"], 1.0)
    unrolled = {"mode": "unrolled", "num_unroll": 3}
    rounded = flops.training_flops(fields, 64, unrolled, 2.9999998)  # the mean of threes in fp32
    assert rounded == flops.training_flops(fields, 64, unrolled, 3)
    with pytest.raises(ValueError, match="needs one"):
        flops.training_flops(fields, 64, None, None)
