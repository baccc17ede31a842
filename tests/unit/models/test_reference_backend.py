"""Under `kernels("reference")` autograd sees every operation: torch.func, forward mode, second derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from implicit_llm.kernels.selection import kernels

EXPLICIT, UNROLLED, FREE, BY_BLOCKS = "explicit", "unrolled", "free", "free by blocks"
IMPLICIT = "free, implicit gradient"
SERIES = "free, series"
TIGHT = {"tol": 1e-9, "max_iter": 100, "eval_max_iter": 100, "eval_block_len": 2}
SOLVERS: dict[str, dict[str, Any]] = {
    UNROLLED: {"mode": "unrolled", "num_unroll": 3},
    FREE: TIGHT,
    BY_BLOCKS: TIGHT | {"block_len": 2},
    IMPLICIT: TIGHT | {"gradient": "implicit", "gradient_tol": 1e-13},
    SERIES: TIGHT | {"gradient": "series"},
}
DIFFERENTIATED = pytest.mark.parametrize("kind", [EXPLICIT, UNROLLED])
ALL = pytest.mark.parametrize("kind", [EXPLICIT, UNROLLED, FREE, BY_BLOCKS, IMPLICIT, SERIES])
IN_EACH_MODE = pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with kernels("reference"):
        yield


@pytest.fixture
def model(make_model, family: str, kind: str):
    if kind == EXPLICIT:
        return make_model(family, EXPLICIT, num_hidden_layers=2).train()
    return make_model(family, num_hidden_layers=2, **SOLVERS[kind]).train()


def logits_of(model) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The logits as a function of the embeddings, and the embeddings."""
    return lambda e_BLD: model(inputs_embeds=e_BLD).logits, model.get_input_embeddings()(IDS).detach()


@ALL
def test_loss_and_gradient_are_those_of_the_torch_kernels(model) -> None:
    def run(**options: Any) -> list[Tensor]:
        loss = model(IDS, labels=IDS, **options).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    for options in ({"aligned": True}, {"return_logits": False}):
        ours = run(**options)
        with kernels("torch"):
            theirs = run(**options)
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


@ALL
@pytest.mark.parametrize(("family", "is_training"), [("mamba2", True), ("llama3", False)], ids=["train", "eval"])
def test_forward_and_reverse_mode_are_derivatives_of_one_map(model, kind: str, is_training: bool) -> None:
    f, e_BLD = logits_of(model.train(is_training))
    v, u = torch.randn_like(e_BLD), torch.randn(*IDS.shape, 23, dtype=torch.float64)
    _, forward = jvp(f, (e_BLD,), (v,))
    (reverse,) = vjp(f, e_BLD)[1](u)
    assert (u * forward).sum().item() == pytest.approx((reverse * v).sum().item(), rel=1e-11)
    assert forward.norm() > 1e-6
    jacobian = jacrev(lambda e: f(e)[0, -1], chunk_size=1 if kind == IMPLICIT else None)(e_BLD)
    torch.testing.assert_close(jacobian.flatten(1) @ v.flatten(), forward[0, -1])

    weights = {name: value.detach() for name, value in model.named_parameters()}
    change = {name: torch.randn_like(value) for name, value in weights.items()}
    g = lambda parameters: functional_call(model, parameters, args=(IDS,)).logits  # noqa: E731
    _, forward = jvp(g, (weights,), (change,))
    (back,) = vjp(g, weights)[1](u)
    expected = sum((back[name] * change[name]).sum() for name in weights)
    assert (u * forward).sum().item() == pytest.approx(expected.item(), rel=1e-11)


@pytest.mark.parametrize("family", ["mamba2"])
@pytest.mark.parametrize("kind", [IMPLICIT, SERIES])
@pytest.mark.parametrize(
    "twice",
    [
        lambda loss, e_BLD: vjp(grad(loss), e_BLD)[1](e_BLD),
        lambda loss, e_BLD: torch.autograd.grad(jvp(loss, (e_BLD,), (e_BLD.detach(),))[1], e_BLD),
        lambda loss, e_BLD: torch.autograd.functional.hvp(loss, e_BLD, e_BLD.detach()),
    ],
    ids=["vjp of grad", "backward of jvp", "create_graph"],
)
def test_second_derivatives_of_implicit_gradient_and_series_are_refused(model, twice: Callable[..., Any]) -> None:
    f, e_BLD = logits_of(model)
    with pytest.raises(NotImplementedError, match="has no second derivatives"):
        twice(lambda e: f(e).square().sum(), e_BLD.requires_grad_())


@DIFFERENTIATED
def test_first_and_second_derivatives_are_those_of_finite_differences(model) -> None:
    f, e_BLD = logits_of(model)
    v, step = torch.randn_like(e_BLD), 1e-7
    _, forward = jvp(f, (e_BLD,), (v,))
    torch.testing.assert_close(forward, (f(e_BLD + step * v) - f(e_BLD - step * v)) / (2 * step), atol=1e-6, rtol=1e-5)
    gradient = grad(lambda e: f(e).square().sum())
    expected = (gradient(e_BLD + step * v) - gradient(e_BLD - step * v)) / (2 * step)
    _, forward_over_reverse = jvp(gradient, (e_BLD,), (v,))
    e = e_BLD.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(e).square().sum(), e, create_graph=True)
    (twice_reverse,) = torch.autograd.grad((first * v).sum(), e)
    for product in (forward_over_reverse, twice_reverse):
        assert (product - expected).norm() < 1e-4 * expected.norm()


@DIFFERENTIATED
def test_vmap_gives_each_sequence_as_alone_and_gradients_by_sequence(model) -> None:
    f, e_BLD = logits_of(model)
    torch.testing.assert_close(vmap(lambda e: f(e[None])[0])(e_BLD), f(e_BLD))
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids_L: Tensor) -> Tensor:
        options = {"labels": ids_L[None], "aligned": True}
        return functional_call(model, parameters, args=(ids_L[None],), kwargs=options).loss

    together = vmap(grad(loss), in_dims=(None, 0))(weights, IDS)
    for row, ids_L in enumerate(IDS):
        alone = grad(loss)(weights, ids_L)
        for name in weights:
            torch.testing.assert_close(together[name][row], alone[name], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", [FREE, IMPLICIT, SERIES])
@IN_EACH_MODE
def test_vmap_over_the_solver_is_refused(model, kind: str, is_training: bool) -> None:
    f, e_BLD = logits_of(model.train(is_training))
    with pytest.raises(NotImplementedError, match=r"vmap cannot cross the fixed-point solver.*batch dimension"):
        vmap(lambda e: f(e[None])[0])(e_BLD)
    if kind == IMPLICIT:
        with pytest.raises(NotImplementedError, match=r"jacrev \(with chunk_size=1"):
            jacrev(f)(e_BLD)
