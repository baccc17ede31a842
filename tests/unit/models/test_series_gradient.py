"""`gradient: series` against the phantom gradient: the same values, one differentiated evaluation of f."""

from dataclasses import replace

import pytest
import torch

from implicit_llm.training.model import apply_runtime
from implicit_llm_contracts.config.training import Runtime

IDS = torch.randint(0, 23, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]])
SOLVED = {"tol": 1e-13, "stop": "token", "max_iter": 300, "eval_stop": "token", "eval_max_iter": 300}
LOOSE = {"tol": 0.02, "max_iter": 50}


def gradients(model, gradient: str, *, mask: torch.Tensor | None = None, scale: float = 1.0) -> dict:
    """Of one loss by every parameter, added to those that are there; and the logits."""
    model.solver = replace(model.solver, gradient=gradient)
    torch.manual_seed(3)  # of dropout
    labels = IDS if mask is None else IDS.masked_fill(mask == 0, -100)
    output = model(IDS, attention_mask=mask, labels=labels, aligned=True)
    (scale * output.loss).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return found | {"logits": output.logits.detach()}


def is_near(found: dict, expected: dict) -> bool:
    """Whether the logits are equal, and the gradients by a cosine of 0.99 and 5 % of their norm."""
    mine, other = (torch.cat([t.flatten() for name, t in of.items() if name != "logits"]) for of in (found, expected))
    cosine = torch.nn.functional.cosine_similarity(mine, other, dim=0)
    is_as_long = 0.95 < mine.norm() / other.norm() < 1.05
    return torch.equal(found["logits"], expected["logits"]) and bool(cosine > 0.99 and is_as_long)


def both(model, **options) -> tuple[dict, dict]:
    found = []
    for gradient in ("phantom", "series"):
        model.zero_grad()
        found.append(gradients(model, gradient, **options))
    return found[0], found[1]


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("block_len", "mask"), [(None, None), (4, None), (4, MASK)], ids=["", "blocks", "padded"])
def test_at_the_fixed_point_the_series_is_the_phantom_gradient(
    make_model, family: str, is_training: bool, block_len: int | None, mask: torch.Tensor | None
) -> None:
    """By every weight, embedding and injection among them: there the phantom steps linearise f at one z."""
    model = make_model(family, num_hidden_layers=2, block_len=block_len, eval_block_len=4, **SOLVED).train(is_training)
    phantom, series = both(model, mask=mask)
    torch.testing.assert_close(series, phantom, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_before_convergence_the_values_are_the_same_and_the_gradients_nearly(
    make_model, family: str, dropout: float
) -> None:
    model = make_model(family, num_hidden_layers=2, dtype=torch.float32, **LOOSE).train()
    model.config.dropout = dropout
    with torch.no_grad():
        for name, parameter in model.base.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)  # far from linear
    phantom, series = both(model)
    assert is_near(series, phantom)
    assert any(not torch.equal(series[name], phantom[name]) for name in phantom)


def test_each_gradient_is_complete_once_and_those_of_micro_batches_add_up(make_model, family: str) -> None:
    model, calls = make_model(family, num_hidden_layers=2, **LOOSE).train(), []
    once = gradients(model, "series")
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    for _ in range(2):
        found = gradients(model, "series", scale=0.5)
    assert sorted(calls) == sorted(2 * [name for name, _ in model.named_parameters()])
    torch.testing.assert_close(found, once)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_computed_again_give_the_same_series(make_model, family: str, dropout: float) -> None:
    model = make_model(family, num_hidden_layers=2, **LOOSE).train()
    model.config.dropout = dropout
    kept = gradients(model, "series")
    model.zero_grad()
    apply_runtime(model, Runtime(gradient_checkpointing=True), "here")
    again = gradients(model, "series")
    assert model.base.gradient_checkpointing
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_under_autocast_the_series_follows_the_phantom_gradient(make_model, family: str) -> None:
    model = make_model(family, num_hidden_layers=2, dtype=torch.float32, **LOOSE).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        phantom, series = both(model)
    assert is_near(series, phantom)


def test_a_series_keeps_the_activations_of_one_step(make_model, family: str) -> None:
    model = make_model(family, num_hidden_layers=4).train()
    ids = torch.randint(0, 23, (8, 64))
    kept = {}
    for gradient, steps in (("phantom", 1), ("phantom", 4), ("series", 4)):
        model.solver = replace(model.solver, gradient=gradient, phantom_steps=steps)
        found: dict[int, torch.Tensor] = {}

        def pack(t: torch.Tensor, found=found) -> torch.Tensor:
            found[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids, labels=ids, aligned=True).loss.backward()
        kept[gradient, steps] = sum(t.untyped_storage().nbytes() for t in found.values())
    assert kept["series", 4] < 1.1 * kept["phantom", 1] < 0.4 * kept["phantom", 4]
