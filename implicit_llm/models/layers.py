"""Define the building blocks of layers: normalised weights, projections, norms, the injection, and layer base classes.

An implicit model applies the same weights dozens of times in one pass. Normalising them (and casting them under
autocast) in every iteration would waste time, so our layers call `effective_weight()` once per pass and use its result
in each iteration. This bypasses the modules' `forward`. If a module must be called, for example because it has a hook
(`touched_module`), its layer calls all its modules in each iteration. A layer of a user's family always does so.

Shapes: `B` batch, `L` length, `D` model, `C` channels, `K` convolution, `E` width of the injection.
"""

import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from implicit_llm.kernels.norm import Branch, add_and_norm, rms_norm
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.stack import LayerState, Mixed, StackInput


class RMSNorm(nn.Module):
    """The root mean square normalisation of x or, with a gate, of x silu(gate), with a learned scale.

    feeds_products: whether only products with weights use the output; its dtype is then that of `product_dtype`.
    """

    def __init__(self, width: int, eps: float, *, feeds_products: bool = False) -> None:
        super().__init__()
        self.eps, self.feeds_products = eps, feeds_products
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BLD: Tensor, gate_BLD: Tensor | None = None) -> Tensor:
        return rms_norm(x_BLD, gate_BLD, self.weight, self.eps, self._dtype(x_BLD))

    def of_sum(self, h_BLD: Tensor, branch_BLD: Branch | None) -> tuple[Tensor, Tensor]:
        """Return h + branch (h alone if the branch is None) and the norm of this sum; one kernel may compute both."""
        if branch_BLD is None or touched_module(self) is not None:
            h_BLD = added(h_BLD, branch_BLD)
            return h_BLD, self(h_BLD)
        return add_and_norm(h_BLD, branch_BLD, self.weight, self.eps, self._dtype(h_BLD))

    def _dtype(self, x_BLD: Tensor) -> torch.dtype:
        return product_dtype(x_BLD) if self.feeds_products else x_BLD.dtype


def added(t: Tensor, other: Branch | None) -> Tensor:
    return t if other is None else t + other


def product_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype of `t` in a product: autocast's dtype if autocast is on and `t` is not fp64, else its own."""
    is_cast = torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64
    return torch.get_autocast_dtype(t.device.type) if is_cast else t.dtype


class NormedWeight(nn.Module):
    """A weight of any shape, plain (`weight`) or weight-normalised (`g`, `v`) over all dimensions but the first.

    A bias is optional. `reset_parameters` must initialise the parameters. They are not named weight_g and weight_v,
    because transformers would rename them when it loads a model.
    Source: Salimans and Kingma 2016, w = g v / ||v||; the published implicit models normalise every linear and
    convolution weight of layers and injection.
    """

    def __init__(
        self, shape: tuple[int, ...], *, weight_norm: bool, bias: bool = False, init_scale: float = 1.0
    ) -> None:
        nn.Module.__init__(self)  # in a Projection, super() is nn.Linear, which draws weights
        self.shape = shape
        self.init_scale = init_scale
        self.is_normed = weight_norm
        if weight_norm:
            self.g = nn.Parameter(torch.empty(shape[0], *(1,) * (len(shape) - 1)))
            self.v = nn.Parameter(torch.empty(shape))
        else:
            self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises: TypeError for `weight` if it is computed."""
        self._refuse_replacement(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, such as a quantiser's `weight`. Raises: TypeError for `weight` if it is computed."""
        self._refuse_replacement(name)
        super().register_parameter(name, param)

    def _refuse_replacement(self, name: str) -> None:
        if name == "weight" and self.is_normed:
            raise TypeError(
                "a weight-normalised layer computes its weight from g and v, so it cannot be quantised or given "
                "another weight; change g and v, or quantise an explicit model"
            )

    def effective_weight(self) -> Tensor:
        """Return the weight, or g v / ||v|| if `is_normed`, in the dtype of products; it is differentiable."""
        weight = self._normalised() if self.is_normed else self.weight
        return weight.to(product_dtype(weight))

    def _normalised(self) -> Tensor:
        return self.v * (self.g / gain_of(self.v))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw bias and weight (or v) uniformly within +-1/sqrt(fan in); multiply the weight by `init_scale`.

        Set g to ||v||. Parameters that come from a checkpoint do not change.
        """
        bound = 1 / math.sqrt(math.prod(self.shape[1:]))
        weight = self.v if self.is_normed else self.weight
        init.uniform_(weight, -bound * self.init_scale, bound * self.init_scale)
        if self.is_normed:
            init.copy_(self.g, gain_of(weight))
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, weight_norm={self.is_normed}"


class Projection(NormedWeight, nn.Linear):  # type: ignore[misc]  # nn.Linear types bias and weight as never None
    """A linear layer; with weight normalisation, `weight` is computed from g and v, and no parameter can replace it.

    options: the keyword arguments of `NormedWeight`.
    """

    def __init__(self, shape: tuple[int, int], **options: Any) -> None:
        super().__init__(shape, **options)
        self.out_features, self.in_features = shape

    def __getattr__(self, name: str) -> Any:  # called for a computed `weight`, which is not stored
        if name == "weight" and self.is_normed:
            return self._normalised().as_subclass(_ComputedWeight)
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight(), self.bias)


class _ComputedWeight(Tensor):
    """A computed weight, into which no adapter can be merged: an assignment to its `data` raises TypeError."""

    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError("an adapter cannot be merged into a weight-normalised projection; keep it unmerged")


def gain_of(weight: Tensor) -> Tensor:
    """Return the norm over all dimensions except the first; the reduced dimensions keep length 1.

    With this norm as the gain g, and with v = `weight`, the normalised weight g v / ||v|| is `weight` itself.
    """
    return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)


class Injection(nn.Module):
    """The injection Linear(RMSNorm(embedding)), which every layer adds to its in-projection."""

    def __init__(self, width: int, out_width: int, eps: float, weight_norm: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.proj = Projection((out_width, width), bias=True, weight_norm=weight_norm)

    def forward(self, embedding_BLD: Tensor) -> Tensor:
        return self.proj(self.norm(embedding_BLD))


class Layer(nn.Module):
    """A causal residual layer h + branch; `mixed` computes the branch from the input that `normed` returns.

    A layer returns its last branch without adding it, because the kernel of the next norm adds it at little extra cost.
    That kernel can also apply a factor to each row, so the branch may be `kernels.norm.Unscaled`.
    rounds_state: whether the layer's products cast the state to their own dtype; a pass that does not advance the state
        may then cast it once, beforehand.
    """

    rounds_state = False

    def normed(self, h_BLD: Tensor, branch_BLD: Branch | None) -> tuple[Tensor, Tensor]:
        """Return h + branch (h alone if the branch is None) and the input of `mixed`.

        This input is the norm of the sum; in a RecurrentLayer it is the sum itself.
        """
        raise NotImplementedError

    def weights(self) -> Any:
        """Return the tensors that a pass computes once from the parameters; None if `mixed` must call the modules."""

    def mixed(self, u_BLD: Tensor, x: StackInput, weights: Any, state: LayerState | None, return_state: bool) -> Mixed:
        """Return the branch (B, L, D), mixed along the sequence, and the state after the block or None.

        u_BLD: the input that `normed` returns. weights: this layer's entry in `x.weights`. state: the state before the
        block; None if it is empty. return_state: whether to return the state after the block.
        """
        raise NotImplementedError

    def forward(
        self, h_BLD: Tensor, branch_BLD: Branch | None, x: StackInput, index: int, return_state: bool
    ) -> tuple[Tensor, Branch, LayerState | None]:
        """Apply the layer to h + branch, where branch is the last branch of the previous layer, or None.

        index: the index of this layer's weights, mask and state in x.
        Returns: the residual stream without this layer's last branch, that branch, and the state after the block (None
            without `return_state`).
        """
        before = None if x.prefix is None else x.prefix.layers[index]
        h_BLD, u_BLD = self.normed(h_BLD, branch_BLD)
        branch_BLD, state = self.mixed(u_BLD, x, x.weights[index], before, return_state)
        if x.dropout_masks is not None:
            branch_BLD = branch_BLD * x.dropout_masks[index]
        return h_BLD, branch_BLD, state


class RecurrentLayer(Layer):
    """A residual layer h + mix(h) of a user's family (`register_family`), causal and with a state of fixed size."""

    def mix(
        self,
        h_BLD: Tensor,
        injection_BLE: Tensor | None,
        state: LayerState | None,
        valid_BL: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """Return y (B, L, D), mixed along the sequence, and the state after the block, a tuple of tensors (B, ...).

        Args: h_BLD: the residual stream, not normalised. injection_BLE (width `config.injection_width`): must be added
            to the in-projection; None for an explicit model. state: the state after the previous tokens; None if there
            are none, which must equal a state of zeros. valid_BL: False for padding, which comes last in each sequence
            and must not change the state; None without padding.
        """
        raise NotImplementedError

    def normed(self, h_BLD: Tensor, branch_BLD: Branch | None) -> tuple[Tensor, Tensor]:
        h_BLD = added(h_BLD, branch_BLD)
        return h_BLD, h_BLD

    def mixed(self, h_BLD: Tensor, x: StackInput, weights: None, state: LayerState | None, return_state: bool) -> Mixed:
        try:
            mixed = self.mix(h_BLD, x.injection_BLE, state, x.valid_BL)
        except RuntimeError as error:
            if x.injection_BLE is None or f"({x.injection_BLE.shape[-1]})" not in str(error):
                raise
            raise ModelConfigError(
                f"injection_width: {type(self).__name__}.mix cannot add an injection of width "
                f"{x.injection_BLE.shape[-1]} ({error}); let injection_width of its configuration be the width of "
                "what it is added to"
            ) from error
        y_BLD, state = self._checked(mixed, h_BLD)
        return y_BLD, state if return_state else None

    def _checked(self, mixed: Any, h_BLD: Tensor) -> tuple[Tensor, LayerState]:
        """Return `mixed`. Raises: ModelConfigError unless it is y (B, L, D) and a tuple of tensors (B, ...)."""
        if isinstance(mixed, tuple) and len(mixed) == 2:
            y_BLD, state = mixed
            is_state = isinstance(state, tuple) and all(
                isinstance(t, Tensor) and t.shape[:1] == h_BLD.shape[:1] for t in state
            )
            if isinstance(y_BLD, Tensor) and y_BLD.shape == h_BLD.shape and is_state:
                return y_BLD, state
        raise ModelConfigError(
            f"{type(self).__name__}.mix must return y {tuple(h_BLD.shape)} and its state, a tuple of tensors with the "
            f"batch first; it returned {_described(mixed)}"
        )


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_described, value)) or 'nothing'}"
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


OUR_MODULES: set[type[nn.Module]] = {Projection, RMSNorm, nn.Embedding}  # a family adds its own modules
_PLAIN_TENSORS = frozenset({nn.Parameter, Tensor, type(None)})


def modules_below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and all modules in it, shared ones repeatedly, eight times as fast as `module.modules()`."""
    waiting = [module]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(module.__dict__["_modules"].values())


def touched_module(module: nn.Module, known: Container[type[nn.Module]] = OUR_MODULES) -> nn.Module | None:
    """Return `module` or a module in it that must be called instead of using its weights; None if there is none.

    Such a module has a hook or an assigned `forward`, or it has no children and either a class that is not in `known`
    (adapters, parametrisations and quantisers replace modules) or parameters of an unknown class (quantised, sharded).
    `fully_shard` adds hooks to the modules that it shards.
    """
    waiting = [module]  # a loop, not a generator, because this runs for every layer at every decoded token
    while waiting:
        found = waiting.pop()
        own = found.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return found
        if children := own["_modules"]:
            waiting.extend(children.values())
        elif type(found) not in known or not _PLAIN_TENSORS.issuperset(map(type, own["_parameters"].values())):
            return found
    return None
