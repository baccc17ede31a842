"""Blocks, compaction and gradients of captured passes, with parts that run where a GPU would replay them.

What CUDA graphs themselves do is tested on a GPU: tests/gpu/test_captured_passes.py.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from implicit_llm import GraphRunner, ImplicitLlama3Config, ImplicitMamba2Config, NonFiniteState
from implicit_llm.cuda_graphs import blocks, runner, training_step
from implicit_llm.cuda_graphs.capture import CaptureFailed
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.runner import Runner
from implicit_llm.solver.fixed_point import Best
from implicit_llm.training.gradients import GradientReducer
from implicit_llm_contracts.plugins import load_plugin
from tests.pages import ROOT

SMALL = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2}
MAMBA = ImplicitMamba2Config(**SMALL, head_dim=8, state_size=8)
LLAMA = ImplicitLlama3Config(**SMALL, num_attention_heads=2, intermediate_size=24)
GROUPED = ImplicitLlama3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=6, intermediate_size=24)
EXPLICIT = ImplicitMamba2Config(**SMALL, head_dim=8, state_size=8, is_implicit=False)
GATED = load_plugin(ROOT / "examples/extending/gated_rnn.py").GatedRnnConfig(**SMALL)  # its layers call their modules
FREE = {"mode": "fixed_point", "max_iter": 12, "phantom_steps": 2, "tol": 0.02}
SERIES = FREE | {"phantom_steps": 3, "gradient": "series"}


class EagerRecorder:
    """Runs a part at its capture and at each replay."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        pass

    def capture(self, part: Callable[[], None], rehearsal: Callable[[], None] | None = None) -> SimpleNamespace:
        (rehearsal or part)()
        return SimpleNamespace(replay=part)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, training_step):
        monkeypatch.setattr(module, "Recorder", EagerRecorder)
    monkeypatch.setattr(runner, "can_capture", lambda model, device: True)


@pytest.fixture
def _only_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, as torchrun would make it for several."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _model(config, **solver):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config))  # which it keeps, and the solver is part of it
    if model.solver is not None:
        model.solver = replace(model.solver, **solver)
    return model


def _captured(config, **solver):
    """A model in training whose steps are captured."""
    model = _model(config, **solver).train()
    model.base.runner = GraphRunner(replays_training=True)
    return model


def _with_plain_gradients(config, is_captured: bool = True, **solver):
    """Such a model or a plain one, a batch, and the gradients of its loss without graphs and other processes."""
    model, ids = _model(config, **solver).train(), torch.randint(37, (4, 6))
    loss = model(input_ids=ids, labels=ids, aligned=True).loss
    plain = torch.autograd.grad(loss, list(model.parameters()))
    if is_captured:
        model.base.runner = GraphRunner(replays_training=True)
    return model, ids, list(plain)


def _by_each_runner(model, act: Callable[[], Any], graphs: GraphRunner | None = None) -> list[Any]:
    """What `act` returns with the plain code, and with graphs."""
    found = []
    for model.base.runner in (Runner(), graphs or GraphRunner()):
        found.append(act())
    return found


def _assert_gradients(model, expected: list[torch.Tensor], **tolerance: float) -> None:
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, **tolerance)


@pytest.mark.parametrize(
    ("config", "solver"),
    [
        (MAMBA, FREE),
        (MAMBA, FREE | {"block_len": 4}),
        (MAMBA, FREE | {"block_len": 4, "stop": "token", "method": "damped"}),
        (MAMBA, {"mode": "unrolled", "num_unroll": 3}),
        (LLAMA, FREE),
        (LLAMA, FREE | {"block_len": 4}),
        (MAMBA, SERIES),
        (LLAMA, SERIES | {"block_len": 4}),
        (GATED, FREE),
        (GATED, FREE | {"block_len": 4}),
        (GATED, SERIES),
        (EXPLICIT, {}),
    ],
)
def test_a_captured_step_gives_the_loss_and_the_gradients_of_the_plain_one(config, solver) -> None:
    model, graphs = _model(config, **solver).train(), GraphRunner(replays_training=True)
    for step in range(2):
        ids, labels = torch.randint(37, (64, 12)), torch.randint(37, (64, 12))
        labels[0, :3] = -100

        def step_once(ids=ids, labels=labels):
            out = model(input_ids=ids, labels=labels, aligned=True)
            model.zero_grad()
            (out.loss * 3).backward()
            return out, [parameter.grad.clone() for parameter in model.parameters()]

        (plain, plain_gradients), (captured, captured_gradients) = _by_each_runner(model, step_once, graphs)
        torch.testing.assert_close(captured.loss, plain.loss)
        torch.testing.assert_close(captured.logits, plain.logits.detach())
        torch.testing.assert_close(captured_gradients, plain_gradients, rtol=1e-3, atol=1e-6)
        if plain.solver_stats is not None:
            assert captured.solver_stats.num_closing == plain.solver_stats.num_closing
            torch.testing.assert_close(captured.solver_stats.num_iter, plain.solver_stats.num_iter)
        # What the next pass must see; a fused optimizer leaves no trace of its step on the parameters.
        torch.optim.AdamW(model.parameters(), lr=0.02, fused=True).step()
        assert step == 1 or graphs.step is not None


@pytest.mark.parametrize("config", [MAMBA, GATED])
@pytest.mark.parametrize("solver", [FREE, SERIES, {"mode": "unrolled", "num_unroll": 3}])
def test_words_that_go_on_from_others_are_solved_from_graphs_as_by_the_plain_code(config, solver) -> None:
    model, graphs = _model(config, **solver, block_len=4).train(), GraphRunner(replays_training=True)
    words = torch.randint(37, (3, 8, 12))

    def read():
        cache, losses = ConvergedStateCache(), []
        model.zero_grad()
        for ids in words:
            out = model(input_ids=ids, labels=ids, aligned=True, past_key_values=cache)
            out.loss.backward()
            losses.append(out.loss)
        assert cache.get_seq_length() == words.shape[0] * words.shape[2]
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return losses, gradients, cache.prefix.layers, out.solver_stats.f_evaluations

    plain, captured = _by_each_runner(model, read, graphs)
    torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-6)
    assert graphs.step is not None


def test_sequences_that_are_done_leave_the_captured_batch() -> None:
    model = _captured(MAMBA, **FREE, block_len=4)
    model(input_ids=torch.randint(37, (64, 12)), labels=torch.randint(37, (64, 12)), aligned=True)
    assert [len(here.active_A) for here in model.base.runner.sequences[True].open] == [64, 32, 16]


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (MAMBA, "blockwise"),
        (MAMBA, "sequential"),
        (LLAMA, "blockwise"),
        (LLAMA, "sequential"),
        (GROUPED, "blockwise"),
        (GATED, "blockwise"),
        (GATED, "sequential"),
    ],
)
def test_captured_evaluation_equals_the_plain_one(config, mode: str) -> None:
    graphs = GraphRunner()
    model = _model(config, eval_mode=mode, eval_block_len=4, tol=1e-4, eval_max_iter=8).eval()
    for _ in range(2):  # the second sequence meets the graphs of the first
        ids = torch.randint(37, (3, 16))
        with torch.no_grad():
            plain, captured = _by_each_runner(model, lambda ids=ids: model(input_ids=ids, use_cache=True), graphs)
        assert graphs.sequences
        torch.testing.assert_close(captured.solver_stats.num_iter, plain.solver_stats.num_iter)
        mine, other = ([out.logits, *out.past_key_values.prefix.layers] for out in (captured, plain))
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_callers_positions_count_in_captured_passes_too(is_training: bool, stride: int) -> None:
    graphs, solver = GraphRunner(replays_training=True), {"block_len": 4, "eval_block_len": 4, "eval_mode": "blockwise"}
    model, ids = _model(LLAMA, **FREE | solver).train(is_training), torch.randint(37, (3, 16))
    pieces = (stride * torch.arange(16 if is_training else 18))[None].split([16] if is_training else [16, 1, 1], dim=1)

    def act():
        cache = None if is_training else ConvergedStateCache()
        with torch.set_grad_enabled(is_training):
            return [model(ids[:, : p.shape[1]], position_ids=p, past_key_values=cache).logits for p in pieces]

    plain, captured = _by_each_runner(model, act, graphs)
    torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-4)
    assert bool(graphs.sequences) == (stride == 1)  # only the default positions are replayed


def test_a_method_that_remembers_iterates_is_captured_in_evaluation_which_never_uses_it() -> None:
    graphs, ids = GraphRunner(replays_training=True), torch.randint(37, (3, 16))
    solver = {"method": "anderson", "eval_mode": "blockwise", "eval_block_len": 4, "tol": 1e-4, "eval_max_iter": 8}
    model = _model(MAMBA, **FREE | solver).eval()
    with torch.no_grad():
        plain, captured = _by_each_runner(model, lambda: model(input_ids=ids), graphs)
    torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-3, atol=1e-4)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert list(graphs.sequences) == [False]  # only those of evaluation


@pytest.mark.parametrize("config", [MAMBA, LLAMA, GROUPED, EXPLICIT, GATED])
def test_captured_tokens_equal_the_plain_ones(config, monkeypatch) -> None:
    monkeypatch.setattr(runner, "ROOM_TOKENS", 4)  # so that keys outgrow it
    model, ids = _model(config, tol=1e-4, eval_max_iter=8).eval(), torch.randint(37, (3, 16))

    @torch.no_grad()
    def read():
        cache, parts = ConvergedStateCache(), ids.split([4, *(1 for _ in range(12))], dim=1)
        return cache, torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)

    (_, plain), (cache, captured) = _by_each_runner(model, read)
    torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-4)
    assert model.base.runner.decoders[cache].graph is not None
    assert deepcopy(model).base.runner.decoders == {}


@pytest.mark.parametrize("config", [MAMBA, LLAMA, EXPLICIT, GATED])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_graphs_of_one_call_of_generate_serve_the_next(config, num_beams: int, monkeypatch) -> None:
    make_graph = Mock(side_effect=blocks.BlockGraph)
    monkeypatch.setattr(runner, "BlockGraph", make_graph)
    model = _model(config, tol=1e-4, eval_max_iter=8).eval()
    how = {"max_new_tokens": 8, "do_sample": False, "num_beams": num_beams, "eos_token_id": None, "pad_token_id": 0}
    graphs = GraphRunner()
    for scale in (1, 1.5):  # the second call finds other weights
        for parameter in model.parameters():
            parameter.data *= scale
        ids = torch.randint(1, 37, (2, 5))  # without padding
        assert torch.equal(*_by_each_runner(model, lambda ids=ids: model.generate(ids, **how), graphs))
        assert make_graph.call_count == 1
        assert len(graphs.decoders) == 0


@pytest.mark.parametrize("config", [MAMBA, LLAMA])
def test_two_caches_at_once_keep_their_own_states(config, monkeypatch) -> None:
    """Also after a pass of several tokens."""
    monkeypatch.setattr(runner, "EAGER_TOKENS", 1)
    model, ids = _model(config, tol=1e-4, eval_max_iter=40).eval(), torch.randint(37, (2, 3, 12))

    @torch.no_grad()
    def read_in_turn():
        caches, logits = [ConvergedStateCache(), ConvergedStateCache()], []
        for parts in zip(*(ids_BL.split([3, 1, 1, 1, 2, 1, 1, 1, 1], dim=1) for ids_BL in ids), strict=True):
            for part, cache in zip(parts, caches, strict=True):
                logits.append(model(input_ids=part, past_key_values=cache).logits)
        return logits

    torch.testing.assert_close(*_by_each_runner(model, read_in_turn), rtol=1e-3, atol=1e-4)


def test_gradients_of_an_overwritten_pass_are_refused() -> None:
    model, ids = _captured(MAMBA, mode="unrolled", num_unroll=2), torch.randint(37, (2, 5))
    first = model(input_ids=ids, labels=ids, aligned=True).loss
    model(input_ids=ids, labels=ids, aligned=True)
    with pytest.raises(RuntimeError, match="call backward"):
        first.backward()


@pytest.mark.usefixtures("_only_process")
def test_gradients_of_a_captured_pass_reach_data_parallel_training() -> None:
    model, ids, plain = _with_plain_gradients(MAMBA, **FREE)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the first pass captures while the reducer already knows the parameters
        model.zero_grad()
        parallel(input_ids=ids, labels=ids, aligned=True).loss.backward()
    _assert_gradients(model, plain, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("_only_process")
@pytest.mark.parametrize(
    ("config", "solver"),
    [(MAMBA, FREE), (MAMBA, {"mode": "unrolled", "num_unroll": 3}), (LLAMA, FREE), (MAMBA, SERIES), (EXPLICIT, {})],
)
def test_a_captured_step_sums_the_gradients_of_the_last_layer_before_it_knows_those_of_the_first(
    config, solver, monkeypatch
) -> None:
    model, ids, plain = _with_plain_gradients(config, **solver)
    model.base.runner.reducer = reducer = GradientReducer(model, torch.float32, bucket_bytes=1)  # one each
    events: list[str] = []
    first, last = model.base.layers
    apply, all_reduce = type(first).forward, torch.distributed.all_reduce

    def watched_layer(layer, *args):
        h_BLD, branch_BLD, state = apply(layer, *args)
        if layer is first and branch_BLD.requires_grad:
            branch_BLD.register_hook(lambda _: events.append("first layer"))
        return h_BLD, branch_BLD, state

    monkeypatch.setattr(type(first), "forward", watched_layer)
    watched_sum = Mock(side_effect=lambda *given, **how: events.append("sum") or all_reduce(*given, **how))
    monkeypatch.setattr(torch.distributed, "all_reduce", watched_sum)
    for _ in range(2):  # the first captures
        events.clear()
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, aligned=True).loss
        with reducer.over_ranks():
            loss.backward()
        _assert_gradients(model, plain, rtol=1e-3, atol=1e-6)
    assert events.count("sum") == len(plain)
    first_step = len(events) - events[::-1].index("first layer")  # the last that the backward pass comes to
    assert events[:first_step].count("sum") >= len(list(last.parameters()))


@pytest.mark.usefixtures("_only_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_in_the_precision_asked_for_and_one_that_a_rank_lacks_is_zero(dtype: torch.dtype) -> None:
    model, ids, plain = _with_plain_gradients(EXPLICIT, is_captured=False)
    model.unused = torch.nn.Parameter(torch.ones(3))
    loss = model(input_ids=ids, labels=ids, aligned=True).loss
    with GradientReducer(model, dtype).over_ranks():
        loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert torch.equal(found.pop("unused"), torch.zeros(3))
    assert all(torch.equal(mine, other.to(dtype).float()) for mine, other in zip(found.values(), plain, strict=True))


@pytest.mark.usefixtures("_only_process")
@pytest.mark.parametrize("bucket_bytes", [1, 100])
def test_gradients_that_share_memory_are_each_summed_once(bucket_bytes: int, monkeypatch) -> None:
    model = torch.nn.ParameterList([torch.ones(4), torch.ones(4)])
    reducer = GradientReducer(model, torch.float32, bucket_bytes)

    def sum_of_two_ranks(flat: torch.Tensor, async_op: bool) -> Mock:
        flat.mul_(2)
        return Mock()

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_of_two_ranks)
    with reducer.over_ranks():
        sum(parameter.view(2, 2) for parameter in model).mul(torch.arange(4.0).view(2, 2)).sum().backward()
    for parameter in model:
        assert torch.equal(parameter.grad, 2 * torch.arange(4.0))


@pytest.mark.usefixtures("_only_process")
def test_a_solver_that_fails_leaves_nan_to_the_ranks_that_wait_for_its_gradients(monkeypatch) -> None:
    model, ids, _ = _with_plain_gradients(MAMBA, **FREE)
    model.base.runner.reducer = GradientReducer(model, torch.float32)
    model(input_ids=ids, labels=ids, aligned=True)
    all_reduce = Mock(wraps=torch.distributed.all_reduce)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(Best, "raise_if_not_finite", Mock(side_effect=NonFiniteState("at position 5")))
    with pytest.raises(NonFiniteState, match="at position 5"):
        model(input_ids=ids, labels=ids, aligned=True)
    assert all_reduce.call_args_list
    assert all(call.args[0].isnan().any() for call in all_reduce.call_args_list)


@pytest.mark.usefixtures("_only_process")
def test_no_rank_replays_a_step_that_another_could_not_capture(monkeypatch, caplog) -> None:
    model, ids, plain = _with_plain_gradients(MAMBA, **FREE)
    model.base.runner.reducer = reducer = GradientReducer(model, torch.float32)
    monkeypatch.setattr(GradientReducer, "is_true_anywhere", lambda reducer, is_true: True)
    loss = model(input_ids=ids, labels=ids, aligned=True).loss
    assert "CUDA graphs cannot be captured here (another process cannot)" in caplog.text
    with reducer.over_ranks():
        loss.backward()
    _assert_gradients(model, plain)


def test_dropout_is_the_same_in_the_solver_and_in_the_phantom_steps() -> None:
    model = _model(ImplicitMamba2Config(**SMALL, head_dim=8, state_size=8, dropout=0.3), **FREE).train()
    ids = torch.randint(37, (4, 6))

    def twice() -> float:
        for _ in range(2):  # the first captures
            torch.manual_seed(1)
            loss = model(input_ids=ids, labels=ids, aligned=True).loss
        return loss.item()

    plain, captured = _by_each_runner(model, twice, GraphRunner(replays_training=True))
    assert captured == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("failing", [blocks, training_step])
def test_a_capture_that_fails_is_said_once_and_the_work_done_without(failing, monkeypatch, caplog) -> None:
    no_memory = Mock(**{"capture.side_effect": CaptureFailed("out of memory")})
    monkeypatch.setattr(failing, "Recorder", lambda autocast: no_memory)
    model = _model(MAMBA, **FREE).train()
    ids = torch.randint(37, (4, 8))
    losses = []
    for step in range(3):
        if step == 1:
            model.base.runner = GraphRunner(replays_training=True)
        losses.append(model(input_ids=ids, labels=ids, aligned=True).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == pytest.approx(losses[2], rel=1e-6)
    assert caplog.text.count("CUDA graphs cannot be captured here (out of memory)") == 1
    assert type(model.base.runner) is Runner


@pytest.mark.parametrize("has_reducer", [False, True])
def test_a_capture_that_fails_in_evaluation_keeps_the_runner_that_all_ranks_have(
    has_reducer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory = Mock(**{"capture.side_effect": CaptureFailed("out of memory")})
    monkeypatch.setattr(blocks, "Recorder", lambda autocast: no_memory)
    model, graphs = _model(MAMBA, **FREE, eval_block_len=4).eval(), GraphRunner(replays_training=True)
    graphs.reducer = Mock() if has_reducer else None
    with torch.no_grad():
        plain, captured = _by_each_runner(model, lambda: model(torch.arange(16)[None]).logits, graphs)
    torch.testing.assert_close(captured, plain)
    assert no_memory.capture.called
    assert (model.base.runner is graphs) == has_reducer


def test_a_step_with_a_hook_on_the_head_is_not_captured() -> None:
    model, ids = _captured(MAMBA, **FREE), torch.randint(37, (2, 6))
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
    assert (len(calls), model.base.runner.step) == (3, None)
