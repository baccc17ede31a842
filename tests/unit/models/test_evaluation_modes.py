"""Simultaneous, blockwise and sequential evaluation find the same fixed point; padding never counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import implicit_llm

FAMILIES = ["mamba2", "llama3"]
TIGHT = {"tol": 1e-10, "eval_max_iter": 200, "eval_stop": "token"}


def evaluate(model, input_ids, **solver):
    model.solver = replace(model.solver, **solver)
    output = model(input_ids)
    assert output.solver_stats.is_converged.all()
    return output.logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 2])
def test_all_modes_and_block_lengths_give_the_same_logits(make_model, family: str, layers: int) -> None:
    model = make_model(family, num_hidden_layers=layers, **TIGHT)
    input_ids = torch.randint(0, 23, (2, 9))
    expected = evaluate(model, input_ids, eval_mode="simultaneous")
    for block_len in (2, 4, 9, 64):
        got = evaluate(model, input_ids, eval_mode="blockwise", eval_block_len=block_len)
        torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(evaluate(model, input_ids, eval_mode="sequential"), expected, atol=1e-8, rtol=1e-8)
    again = implicit_llm.sequential_forward(model, input_ids).logits
    torch.testing.assert_close(again, expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("method", ["plain", "damped", "anderson"])
@pytest.mark.parametrize("stop", ["sequence", "token", "batch"])
def test_every_method_and_stopping_rule_reaches_the_same_fixed_point(make_model, method: str, stop: str) -> None:
    model = make_model("mamba2", **TIGHT)
    input_ids = torch.randint(0, 23, (4, 9))
    expected = evaluate(model, input_ids, eval_mode="sequential")
    got = evaluate(model, input_ids, eval_mode="blockwise", eval_block_len=4, method=method, eval_stop=stop)
    torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_left_padding_changes_nothing_for_the_tokens_after_it(make_model, family: str, kind: str) -> None:
    model = make_model(family, kind, **TIGHT, eval_mode="blockwise", eval_block_len=4)
    lengths = [11, 7, 1]
    rows = [torch.randint(0, 23, (length,)) for length in lengths]
    padded = torch.stack([torch.cat([torch.full((11 - len(row),), 5), row]) for row in rows])
    mask = torch.stack([(torch.arange(11) >= 11 - length).long() for length in lengths])
    together = model(padded, attention_mask=mask)
    if kind == "implicit":
        assert together.solver_stats.is_converged.all()
    for row, logits in zip(rows, together.logits, strict=True):
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(logits[-len(row) :], alone, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_right_padding_changes_nothing_for_the_tokens_before_it(make_model, family: str, kind: str) -> None:
    model = make_model(family, kind, **TIGHT, eval_mode="simultaneous")
    row = torch.randint(0, 23, (6,))
    padded = torch.cat([row, torch.full((5,), 3)])[None]
    mask = torch.tensor([[1] * 6 + [0] * 5])
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, :6], model(row[None]).logits, atol=1e-8, rtol=1e-8
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_a_cache_continues_as_if_the_whole_sequence_had_been_given(make_model, family: str, kind: str) -> None:
    model = make_model(family, kind, **TIGHT, eval_mode="sequential")
    input_ids = torch.randint(0, 23, (2, 10))
    expected = model(input_ids).logits
    first = model(input_ids[:, :6], use_cache=True)
    assert first.past_key_values.get_seq_length() == 6
    second = model(input_ids[:, 6:], past_key_values=first.past_key_values)
    assert second.past_key_values.get_seq_length() == 10
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, atol=1e-8, rtol=1e-8)


def test_sequences_leave_the_batch_without_touching_the_others(make_model) -> None:
    model = make_model("mamba2", tol=1e-6, eval_mode="simultaneous", eval_max_iter=200)
    input_ids = torch.randint(0, 23, (8, 12))
    input_ids[0] = 0  # the same token again and again converges at another pace
    together = model(input_ids)
    assert len(set(together.solver_stats.num_iter.tolist())) > 1
    for row in range(8):
        alone = model(input_ids[row : row + 1])
        assert alone.solver_stats.num_iter[0] == together.solver_stats.num_iter[row]
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-12, rtol=1e-12)


def test_tokens_that_do_not_converge_are_counted_and_located(make_model) -> None:
    model = make_model("mamba2", tol=1e-12, eval_mode="blockwise", eval_block_len=4, eval_max_iter=3)
    stats = model(torch.randint(0, 23, (2, 8)), output_positions=True).solver_stats
    assert not stats.is_converged.any()
    assert stats.unconverged_BL.shape == (2, 8)
    assert stats.unconverged_tokens.tolist() == stats.unconverged_BL.sum(1).tolist() == [8, 8]


def test_training_blockwise_gives_the_loss_and_gradient_of_solving_the_whole_sequence(make_model) -> None:
    model = make_model("mamba2", tol=1e-11, max_iter=300, phantom_steps=3, stop="token").train()
    input_ids = torch.randint(0, 23, (3, 10))

    def run(block_len):
        model.zero_grad()
        model.solver = replace(model.solver, block_len=block_len)
        output = model(input_ids, labels=input_ids, aligned=True)
        output.loss.backward()
        return output.loss, model.backbone.layers[0].mixer.in_proj.v.grad.clone()

    loss, gradient = run(None)
    for block_len in (1, 4):
        other_loss, other_gradient = run(block_len)
        torch.testing.assert_close(other_loss, loss, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-8, rtol=1e-8)
