"""A model in evaluation mode is differentiable: its values stay, and a gradient comes with them."""

from dataclasses import replace

import pytest
import torch

BOTH = pytest.mark.parametrize("family", ["mamba2", "llama3"])
MODES = pytest.mark.parametrize("eval_mode", ["blockwise", "simultaneous", "sequential"])
SOLVED = {"tol": 1e-12, "eval_max_iter": 300, "eval_stop": "token", "eval_block_len": 3}
EXACT = SOLVED | {"gradient": "implicit", "gradient_tol": 1e-12}


@BOTH
@MODES
@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
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


@BOTH
@MODES
def test_many_phantom_steps_have_the_gradient_that_the_implicit_function_theorem_gives(
    make_model, family: str, eval_mode: str
) -> None:
    input_ids, found = torch.randint(0, 23, (2, 7)), []
    for settings in (SOLVED | {"phantom_steps": 40}, EXACT):
        model = make_model(family, num_hidden_layers=2, eval_mode=eval_mode, **settings)
        model(input_ids, labels=input_ids).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
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


@BOTH
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


@BOTH
def test_an_unrolled_model_and_frozen_weights_have_gradients_by_the_input_in_evaluation(
    make_model, family: str
) -> None:
    model = make_model(family, mode="unrolled", phantom_steps=1).requires_grad_(False)
    embedding = model.get_input_embeddings()(torch.randint(0, 23, (1, 6))).requires_grad_()
    model(inputs_embeds=embedding).logits[0, -1, 5].backward()
    assert (embedding.grad.abs().sum(-1) > 0).all()


def test_an_unsolved_implicit_gradient_is_said(make_model, caplog) -> None:
    model = make_model("mamba2", **EXACT | {"eval_max_iter": 2})
    input_ids = torch.randint(0, 23, (2, 5))
    model(input_ids, labels=input_ids).loss.backward()
    assert "2 of 2 sequences is not solved to solver.gradient_tol 1e-12" in caplog.text
    assert replace(model.solver, gradient="phantom").differentiated_steps == 4
