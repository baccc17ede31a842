"""Simultaneous, blockwise and sequential evaluation find the same fixed point, differentiably; padding never counts."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import implicit_llm

IDS = torch.randint(1, 23, (2, 9), generator=torch.Generator().manual_seed(0))
TIGHT = {"tol": 1e-10, "eval_max_iter": 200, "eval_stop": "token"}


def evaluate(model, input_ids, **solver):
    model.solver = replace(model.solver, **solver)
    output = model(input_ids)
    assert output.solver_stats.is_converged.all()
    return output.logits


@pytest.mark.parametrize("layers", [1, 2])
def test_all_modes_and_block_lengths_give_the_same_logits(make_model, family: str, layers: int) -> None:
    model = make_model(family, num_hidden_layers=layers, **TIGHT)
    expected = evaluate(model, IDS, eval_mode="simultaneous")
    for block_len in (2, 4, 9, 64):
        got = evaluate(model, IDS, eval_mode="blockwise", eval_block_len=block_len)
        torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(evaluate(model, IDS, eval_mode="sequential"), expected, atol=1e-8, rtol=1e-8)
    again = implicit_llm.sequential_forward(model, IDS).logits
    torch.testing.assert_close(again, expected, atol=1e-8, rtol=1e-8)


def test_evaluation_is_damped_by_tau_whatever_the_method_of_training(make_model, family: str) -> None:
    model = make_model(family, tau=0.5)
    damped = evaluate(model, IDS, method="damped")
    for method in ("plain", "anderson"):
        assert torch.equal(evaluate(model, IDS, method=method), damped)
    assert not torch.equal(evaluate(model, IDS, tau=1.0), damped)


LENGTHS = [11, 7, 6, 4, 1]


def padded(*sides: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rows of several lengths, and the batch that holds them, padded on these sides in turn, with its mask."""
    torch.manual_seed(1)
    rows, width = [torch.randint(0, 23, (length,)) for length in LENGTHS], max(LENGTHS)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, length in enumerate(LENGTHS):
        places = {"left": range(width - length, width), "right": range(length), "between": torch.randperm(width)}
        mask[index, list(places[sides[index % len(sides)]])[:length]] = 1
    batch = torch.full_like(mask, 5)
    batch[mask.bool()] = torch.cat(rows)
    return rows, batch, mask


def loosely_solved(make_model, family: str, kind: str = "implicit", **solver):
    """A model far from linear at the default tolerance, so that what is solved together shows in the result."""
    model = make_model(family, kind, num_hidden_layers=2, eval_block_len=4, **solver)
    with torch.no_grad():
        for name, parameter in model.base.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.get_input_embeddings().weight.mul_(5)
    return model


@pytest.mark.parametrize(
    ("eval_mode", "eval_stop"),
    [
        ("blockwise", "sequence"),
        ("blockwise", "token"),
        ("simultaneous", "sequence"),
        ("simultaneous", "token"),
        ("sequential", "token"),
        ("explicit", None),
    ],
)
def test_padding_is_as_if_it_were_not_there(make_model, family: str, eval_mode: str, eval_stop: str) -> None:
    """At the default tolerance: logits, iterations, and what a cache goes on with."""
    if eval_mode == "explicit":
        model = loosely_solved(make_model, family, "explicit")
    else:
        model = loosely_solved(make_model, family, eval_mode=eval_mode, eval_stop=eval_stop)
    rows, batch, mask = padded("right", "left", "between")
    together = model(batch, attention_mask=mask, use_cache=True)
    more = torch.randint(0, 23, (len(rows), 3))
    after = model(more, attention_mask=F.pad(mask, (0, 3), value=1), past_key_values=together.past_key_values)
    for index, row in enumerate(rows):
        alone = model(row[None], use_cache=True)
        close = {"atol": 1e-9, "rtol": 1e-9}
        torch.testing.assert_close(together.logits[index, mask[index].bool()], alone.logits[0], **close)
        continued = model(more[index : index + 1], past_key_values=alone.past_key_values)
        torch.testing.assert_close(after.logits[index], continued.logits[0], **close)
        if eval_mode == "explicit":
            continue
        for found, expected in ((together, alone), (after, continued)):
            torch.testing.assert_close(found.solver_stats.num_iter[index], expected.solver_stats.num_iter[0])
            torch.testing.assert_close(found.solver_stats.residual[index], expected.solver_stats.residual[0])
        unconverged_L = together.solver_stats.unconverged_BL[index]
        assert torch.equal(unconverged_L[mask[index].bool()], alone.solver_stats.unconverged_BL[0])
        assert not unconverged_L[~mask[index].bool()].any()


@pytest.mark.parametrize("stop", ["sequence", "batch"])
@pytest.mark.parametrize("is_training", [True, False])
def test_left_padding_equals_right_padding(make_model, family: str, stop: str, is_training: bool) -> None:
    """Also where the batch decides together, and in training with blocks: then gradients as well."""
    model = loosely_solved(make_model, family, stop=stop, eval_stop=stop, block_len=4).train(is_training)
    found = []
    for side in ("left", "right"):
        _, batch, mask = padded(side)
        logits = model(batch, attention_mask=mask).logits[mask.bool()]
        gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        found.append([logits.detach(), *gradients])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-7)


def test_training_with_blocks_does_not_see_padding(make_model, family: str) -> None:
    model = loosely_solved(make_model, family, block_len=4).train()
    rows, batch, mask = padded("left")
    together = model(batch, attention_mask=mask).logits
    for index, row in enumerate(rows):
        torch.testing.assert_close(
            together[index, mask[index].bool()], model(row[None]).logits[0], atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize(("kind", "is_training"), [("implicit", False), ("implicit", True), ("explicit", False)])
def test_a_cache_continues_as_if_the_whole_sequence_had_been_given(
    make_model, family: str, kind: str, is_training: bool
) -> None:
    model = make_model(family, kind, **TIGHT, eval_mode="sequential", max_iter=200).train(is_training)
    expected = model(IDS).logits
    first = model(IDS[:, :6], use_cache=True)
    assert first.past_key_values.get_seq_length() == 6
    second = model(IDS[:, 6:], past_key_values=first.past_key_values)
    assert second.past_key_values.get_seq_length() == 9
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, atol=1e-8, rtol=1e-8)


def test_tokens_that_do_not_converge_are_counted_and_located(make_model) -> None:
    model = make_model("mamba2", tol=1e-12, eval_mode="blockwise", eval_block_len=4, eval_max_iter=3)
    stats = model(torch.randint(0, 23, (2, 8))).solver_stats
    assert not stats.is_converged.any()
    assert stats.unconverged_tokens.tolist() == stats.unconverged_BL.sum(1).tolist() == [8, 8]


def test_training_blockwise_gives_the_loss_and_gradient_of_solving_the_whole_sequence(make_model) -> None:
    model = make_model("mamba2", tol=1e-11, max_iter=300, phantom_steps=3, stop="token").train()

    def run(block_len):
        model.solver = replace(model.solver, block_len=block_len)
        output = model(IDS, labels=IDS, aligned=True)
        assert output.solver_stats.num_closing == 3 + (block_len is not None)  # one f closes each of several blocks
        return output.loss, *torch.autograd.grad(output.loss, model.backbone.layers[0].mixer.in_proj.v)

    loss, gradient = run(None)
    for block_len in (1, 4):
        other_loss, other_gradient = run(block_len)
        torch.testing.assert_close(other_loss, loss, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    "phase",
    [
        {"mode": "unrolled", "num_unroll": 1},
        {"max_iter": 4, "phantom_steps": 1},
        {"max_iter": 32, "phantom_steps": 4, "block_len": 4},
        {"gradient": "implicit"},
        {"gradient": "series"},
    ],
)
def test_a_model_read_as_trained_answers_as_in_training(make_model, family: str, phase: dict) -> None:
    model = loosely_solved(make_model, family)
    _, batch, mask = padded("left", "right")
    model.solver = replace(model.solver, **phase)
    for given in ({}, {"attention_mask": mask}):
        trained = model.train()(batch, **given)
        with torch.no_grad():
            read = model.eval()(batch, eval_mode="as_trained", **given)
        torch.testing.assert_close(read.logits, trained.logits, rtol=0, atol=0)
        assert torch.equal(read.solver_stats.f_evaluations, trained.solver_stats.f_evaluations)


def test_a_model_read_as_trained_leaves_no_state_and_says_so(make_model) -> None:
    model = make_model("mamba2", mode="unrolled", num_unroll=1, eval_mode="as_trained", num_hidden_layers=2)
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(IDS, **settings)
    words = model.generate(IDS, use_cache=False, **settings)
    assert torch.equal(words[:, -1], model(words[:, :-1]).logits[:, -1].argmax(-1))


MODES = pytest.mark.parametrize("eval_mode", ["blockwise", "simultaneous", "sequential"])
SOLVED = {"tol": 1e-12, "eval_max_iter": 300, "eval_stop": "token", "eval_block_len": 3}
EXACT = SOLVED | {"gradient": "implicit", "gradient_tol": 1e-12}


@MODES
@pytest.mark.parametrize("gradient", ["phantom", "series", "implicit"])
def test_values_are_those_without_gradient_and_every_parameter_has_one(
    make_model, family: str, eval_mode: str, gradient: str
) -> None:
    model = make_model(family, dtype=torch.float32, eval_mode=eval_mode, eval_block_len=3, gradient=gradient)
    input_ids = torch.randint(0, 23, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for given in (None, mask):
        with torch.no_grad():
            expected = model(input_ids, attention_mask=given)
        found = model(input_ids, attention_mask=given, labels=input_ids)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.solver_stats.num_iter, expected.solver_stats.num_iter)
        model.zero_grad()
        found.loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@MODES
def test_many_phantom_steps_have_the_gradient_that_the_implicit_function_theorem_gives(
    make_model, family: str, eval_mode: str
) -> None:
    input_ids, found = torch.randint(0, 23, (2, 7)), []
    for settings in (SOLVED | {"phantom_steps": 40}, EXACT):
        model = make_model(family, num_hidden_layers=2, eval_mode=eval_mode, **settings)
        loss = model(input_ids, labels=input_ids).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for phantom, implicit in zip(*found, strict=True):
        torch.testing.assert_close(phantom, implicit, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(("family", "is_training"), [("mamba2", False), ("llama3", True)])
def test_the_implicit_gradient_is_that_of_finite_differences(make_model, family: str, is_training: bool) -> None:
    """By the input and by every parameter, of several sequences with padding."""
    model = make_model(family, max_iter=300, stop="token", **EXACT).train(is_training)
    input_ids = torch.randint(0, 23, (3, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 0, 0, 1, 1]])
    embedding = model.get_input_embeddings()(input_ids).detach()
    weight_BLV = torch.randn(3, 6, 23, dtype=torch.float64) * mask[..., None]

    def value() -> torch.Tensor:
        return (model(inputs_embeds=embedding, attention_mask=mask).logits * weight_BLV).sum()

    embedding.requires_grad_()
    tensors = [embedding, *model.parameters()]
    for tensor, gradient in zip(tensors, torch.autograd.grad(value(), tensors), strict=True):
        direction, moved = torch.randn_like(tensor), []
        with torch.no_grad():
            for eps in (1e-5, -2e-5):
                tensor.add_(direction, alpha=eps)
                moved.append(value())
            tensor.add_(direction, alpha=1e-5)
        torch.testing.assert_close((gradient * direction).sum(), (moved[0] - moved[1]) / 2e-5, atol=1e-7, rtol=1e-6)


def test_a_carried_cache_is_constant(make_model, family: str) -> None:
    model = make_model(family, **SOLVED, phantom_steps=40)
    embedding = model.get_input_embeddings()(torch.randint(0, 23, (2, 8))).detach()

    def last(first_BLD: torch.Tensor, rest_BLD: torch.Tensor) -> torch.Tensor:
        cache = model(inputs_embeds=first_BLD, use_cache=True).past_key_values
        return model(inputs_embeds=rest_BLD, past_key_values=cache).logits[:, -1].sum(0)

    of_first, of_rest = torch.autograd.functional.jacobian(last, (embedding[:, :5], embedding[:, 5:]))
    assert of_first.abs().max() == 0
    with torch.no_grad():
        direction = torch.randn_like(embedding[:, 5:])
        moved = [last(embedding[:, :5], embedding[:, 5:] + eps * direction) for eps in (1e-5, -1e-5)]
    difference = (moved[0] - moved[1]) / 2e-5
    torch.testing.assert_close((of_rest * direction).sum((1, 2, 3)), difference, atol=1e-7, rtol=1e-5)


def test_an_unrolled_model_and_frozen_weights_have_gradients_by_the_input_in_evaluation(
    make_model, family: str
) -> None:
    model = make_model(family, mode="unrolled", phantom_steps=1).requires_grad_(False)
    embedding = model.get_input_embeddings()(torch.randint(0, 23, (1, 6))).requires_grad_()
    model(inputs_embeds=embedding).logits[0, -1, 5].backward()
    assert (embedding.grad.abs().sum(-1) > 0).all()


def test_an_unsolved_implicit_gradient_is_said(make_model, caplog) -> None:
    model = make_model("mamba2", **EXACT | {"eval_max_iter": 2})
    model(IDS, labels=IDS).loss.backward()
    assert "2 of 2 sequences is not solved to solver.gradient_tol 1e-12" in caplog.text
    assert replace(model.solver, gradient="phantom").steps_after_solve == 4
