"""Define the Mamba2 block, explicit or implicit: a pre-norm, a mixer and a residual connection, without MLP.

Shapes: `B` batch, `L` length, `D` model, `I` inner, `H` heads, `P` head width, `G` groups, `N` state, `K` convolution,
`C` convolved channels, `E` in-projection (2 I + 2 G N + H).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from implicit_llm.kernels.norm import Branch, Unscaled
from implicit_llm.kernels.selection import (
    scan_runs_on_triton,
    search_runs_on_triton,
    selected_kernels,
    token_stack_runs_on_triton,
    trained_scan_runs_on_triton,
)
from implicit_llm.models.backbone import RecurrentModel
from implicit_llm.models.causal_lm import RecurrentForCausalLM
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import OUR_MODULES, Layer, NormedWeight, Projection, RMSNorm, added, touched_module
from implicit_llm.models.mamba2.causal_conv import causal_conv, last_inputs
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.ssd import gated_scan, ssd
from implicit_llm.models.stack import LayerState, Mixed, Prefix, StackInput
from implicit_llm.solver.passes import Search
from implicit_llm.solver.stats import Block

if TYPE_CHECKING:
    from implicit_llm.models.mamba2.triton.decode import Mamba2TokenLayer


@strict
class ImplicitMamba2Config(ImplicitConfig):
    """The configuration of Mamba2 layers, which have a norm, a mixer and a residual connection, and no MLP.

    expand * hidden_size is the inner width, divided into heads of head_dim. state_size is the number of SSM states per
    head channel. conv_kernel is the width of the causal convolution. n_groups is the number of groups of heads that
    share B and C.
    Source: Dao and Gu 2024; sizes of Schöne et al. 2025.
    """

    model_type = "implicit_mamba2"

    expand: int = 2
    state_size: int = 128
    head_dim: int = 64
    n_groups: int = 1
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size % self.head_dim:
            raise ModelConfigError(
                f"head_dim: {self.head_dim} does not divide expand * hidden_size = {self.intermediate_size}; "
                "choose a divisor"
            )
        if self.num_heads % self.n_groups:
            raise ModelConfigError(
                f"n_groups: {self.n_groups} does not divide the {self.num_heads} heads; choose a divisor"
            )
        super().__post_init__(**kwargs)

    @property
    def intermediate_size(self) -> int:
        """The inner width of the mixer."""
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        return self.intermediate_size // self.head_dim

    @property
    def injection_width(self) -> int:
        """The width of gate, x, B, C and dt together, which is that of the in-projection and of the injection."""
        return 2 * self.intermediate_size + 2 * self.n_groups * self.state_size + self.num_heads


class Mamba2Weights(NamedTuple):
    """The effective weights of one layer for one forward pass; None replaces them if the modules are called instead."""

    in_proj_ED: Tensor
    conv_CK: Tensor
    out_proj_DI: Tensor
    A_H: Tensor


def _wide(t: Tensor) -> Tensor:
    """Return `t` in fp32 or wider, because decays accumulate over the sequence."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


class CausalConv(NormedWeight):
    """The depthwise causal convolution of a Mamba2 block and the silu after it."""

    def forward(
        self,
        x_BLC: Tensor,
        initial_BKC: Tensor | None = None,
        return_state: bool = False,
        valid_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `models.mamba2.causal_conv.causal_conv` with this module's weight and bias, and with silu."""
        weight_CK = self.effective_weight().squeeze(1)
        return causal_conv(
            x_BLC, weight_CK, self.bias, initial_BKC, silu=True, return_state=return_state, valid_BL=valid_BL
        )


OUR_MODULES.add(CausalConv)


class Mamba2Mixer(nn.Module):
    """The mixer: in-projection plus injection, causal convolution, SSD (see `ssd`), gated norm, out-projection.

    Source: Dao and Gu 2024; the injection is the x of Eqs. 6-7 in Schöne et al. 2025.
    """

    def __init__(self, config: ImplicitMamba2Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.groups, self.state_size = config.n_groups, config.state_size
        self.inner = config.intermediate_size
        self.conv_channels = self.inner + 2 * self.groups * self.state_size
        normed = config.has_weight_norm
        self.in_proj = Projection((config.injection_width, config.hidden_size), weight_norm=normed)
        self.conv1d = CausalConv((self.conv_channels, 1, config.conv_kernel), bias=True, weight_norm=normed)
        # As in GPT-2, a branch of the residual stream is scaled down by depth at initialisation.
        self.out_proj = Projection(
            (config.hidden_size, self.inner), weight_norm=normed, init_scale=config.num_hidden_layers**-0.5
        )
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.inner, config.layer_norm_epsilon)

    def weights(self) -> Mamba2Weights:
        return Mamba2Weights(
            self.in_proj.effective_weight(),
            self.conv1d.effective_weight().squeeze(1),
            self.out_proj.effective_weight(),
            self._decay_rates(),
        )

    def _decay_rates(self) -> Tensor:
        return -_wide(self.A_log).exp()

    def forward(
        self, u_BLD: Tensor, weights: Mamba2Weights | None, x: StackInput, state: LayerState | None, return_state: bool
    ) -> Mixed:
        """Return the branch (B, L, D), and the layer's state after the block (None without `return_state`).

        Args: state holds the SSM state (B, H, P, N), in fp32 or the dtype of products, and the last K-1 inputs of the
            convolution (B, K-1, C) before the block; None if no tokens precede it.
        """
        if weights is None:
            y_BLI, state = self._mix(added(self.in_proj(u_BLD), x.injection_BLE), None, x, state, return_state)
            return self.out_proj(y_BLI), state
        injection_BLE = x.injection_BLE
        if torch.is_grad_enabled() or selected_kernels() != "triton":
            projected_BLE, injection_BLE = _project(u_BLD, weights.in_proj_ED, injection_BLE), None
        else:  # the kernels load the injection and add it themselves
            projected_BLE = F.linear(u_BLD, weights.in_proj_ED)
        sizes, taps = (self.head_dim, self.groups, self.state_size), weights.conv_CK.shape[1]
        valid_BL = x.valid_BL if return_state else None  # padding is at the end, so it affects only the state
        if torch.is_grad_enabled():
            starts_fixed = not any(t.requires_grad for t in state or ())
            is_fused = starts_fixed and trained_scan_runs_on_triton(projected_BLE, valid_BL, sizes, taps)
        else:
            is_fused = scan_runs_on_triton(projected_BLE, valid_BL, sizes, taps)
        if is_fused:
            return self._mix_in_one_kernel(projected_BLE, injection_BLE, weights, state, return_state)
        y_BLI, state = self._mix(added(projected_BLE, injection_BLE), weights, x, state, return_state)
        return F.linear(y_BLI, weights.out_proj_DI), state

    def _mix(
        self,
        projected_BLE: Tensor,
        weights: Mamba2Weights | None,
        x: StackInput,
        state: LayerState | None,
        return_state: bool,
    ) -> tuple[Tensor, LayerState | None]:
        """Apply the causal convolution, SSD and the gated norm to `projected_BLE`, which includes the injection.

        Return the result (B, L, I), and the layer's state after the last token (None without `return_state`).
        """
        batch, length, _ = projected_BLE.shape
        gate, xBC, dt_BLH = projected_BLE.split([self.inner, self.conv_channels, self.heads], dim=-1)
        dt_BLH = F.softplus(_wide(dt_BLH) + self.dt_bias)
        if return_state and x.valid_BL is not None:  # padding neither feeds nor decays the state
            dt_BLH = dt_BLH * x.valid_BL.unsqueeze(-1)
        ssm_state, conv_state = (None, None) if state is None else state
        if weights is None:
            xBC, conv_state = self.conv1d(xBC, conv_state, return_state, x.valid_BL)
        else:
            conv = (weights.conv_CK, self.conv1d.bias, conv_state)
            xBC, conv_state = causal_conv(xBC, *conv, silu=True, return_state=return_state, valid_BL=x.valid_BL)
        bc = self.groups * self.state_size
        x_BLI, B_BLI, C_BLI = xBC.split([self.inner, bc, bc], dim=-1)
        y_BLHP, ssm_state = ssd(
            x_BLI.view(batch, length, self.heads, self.head_dim),
            dt_BLH,
            self._decay_rates() if weights is None else weights.A_H,
            B_BLI.view(batch, length, self.groups, self.state_size),
            C_BLI.view(batch, length, self.groups, self.state_size),
            ssm_state,
            D_H=self.D,
            return_state=return_state,
        )
        y_BLI = self.norm(y_BLHP.reshape(batch, length, self.inner), gate)
        return y_BLI, None if ssm_state is None or conv_state is None else (ssm_state, conv_state)

    def _mix_in_one_kernel(
        self,
        projected_BLE: Tensor,
        injection_BLE: Tensor | None,
        weights: Mamba2Weights,
        state: LayerState | None,
        return_state: bool,
    ) -> Mixed:
        """Apply `_mix` and the out-projection to projected + injection with Triton kernels.

        There must be no padding, and no state may have a gradient. If gradients are disabled, the branch is `Unscaled`:
        the sum after this layer applies the scale of the gated norm. In fp16 a product of rows that are not normed
        could overflow, so the norm is computed here.
        """
        assert self.conv1d.bias is not None
        scan = partial(
            gated_scan,
            projected_BLE,
            injection_BLE,
            ScanWeights(weights.conv_CK, self.conv1d.bias, self.dt_bias, weights.A_H, self.D),
            (self.head_dim, self.groups, self.state_size),
            state,
            return_state=return_state,
        )
        branch_BLD: Branch
        if torch.is_grad_enabled() or projected_BLE.dtype == torch.float16:
            y_BLI, ssm_state = scan()
            branch_BLD = F.linear(self.norm(y_BLI), weights.out_proj_DI)
        else:
            squares_BLH = projected_BLE.new_empty(*projected_BLE.shape[:2], self.heads, dtype=torch.float32)
            y_BLI, ssm_state = scan(norm=(self.norm.weight, squares_BLH))
            out_BLD = F.linear(y_BLI, weights.out_proj_DI)
            branch_BLD = Unscaled(out_BLD, squares_BLH, self.inner, self.norm.eps)
        if ssm_state is None:
            return branch_BLD, None
        kept = weights.conv_CK.shape[1] - 1
        columns = slice(self.inner, self.inner + self.conv_channels)
        xBC = projected_BLE[:, -kept:, columns]
        if injection_BLE is not None:
            xBC = xBC + injection_BLE[:, -kept:, columns]
        return branch_BLD, (ssm_state, last_inputs(xBC.detach(), None if state is None else state[1], kept))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as in Mamba2: softplus(dt_bias) log-uniform in [1e-3, 1e-1], -A uniform in [1, 16], and D = 1."""
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))
        init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log())
        init.ones_(self.D)


def _project(u_BLD: Tensor, weight_ED: Tensor, injection_BLE: Tensor | None) -> Tensor:
    if injection_BLE is None:
        return F.linear(u_BLD, weight_ED)
    # addmm accumulates onto the injection, which saves one of two passes over the block's widest tensor.
    flat = torch.addmm(injection_BLE.flatten(0, 1), u_BLD.flatten(0, 1), weight_ED.t())
    return flat.view(*u_BLD.shape[:2], -1)


class Mamba2Layer(Layer):
    """A layer that computes h + mixer(norm(h))."""

    rounds_state = True

    def __init__(self, config: ImplicitMamba2Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, feeds_products=True)
        self.mixer = Mamba2Mixer(config)

    def weights(self) -> Mamba2Weights | None:
        return self.mixer.weights() if touched_module(self) is None else None

    def normed(self, h_BLD: Tensor, branch_BLD: Branch | None) -> tuple[Tensor, Tensor]:
        return self.norm.of_sum(h_BLD, branch_BLD)

    def mixed(
        self, u_BLD: Tensor, x: StackInput, weights: Mamba2Weights | None, state: LayerState | None, return_state: bool
    ) -> Mixed:
        return self.mixer(u_BLD, weights, x, state, return_state)


class ImplicitMamba2Model(RecurrentModel):
    """A stack of Mamba2 blocks, explicit or iterated to the fixed point."""

    config_class = ImplicitMamba2Config
    config: ImplicitMamba2Config
    layer_class = Mamba2Layer
    norm_f: RMSNorm
    _no_split_modules = ["Mamba2Layer"]  # noqa: RUF012 (an instance variable in transformers)

    def solve_at_once(self, x: StackInput, width: int, search: Search) -> tuple[Tensor, Prefix, list[Block]] | None:
        layer, weights, injection_BLE = cast(Mamba2Layer, self.layers[0]), x.weights[0], x.injection_BLE
        mixer, bias_C = layer.mixer, layer.mixer.conv1d.bias
        sizes = (mixer.head_dim, mixer.groups, mixer.state_size)
        if len(self.layers) > 1 or weights is None or injection_BLE is None or bias_C is None:
            return None
        if search.damping is None or x.valid_BL is not None:
            return None
        taps = weights.conv_CK.shape[1]
        if not search_runs_on_triton(injection_BLE, weights.out_proj_DI, sizes, taps, width, search.rule.stop):
            return None
        from implicit_llm.models.mamba2.triton import search as triton_search

        scan = ScanWeights(weights.conv_CK, bias_C, mixer.dt_bias, weights.A_H, mixer.D)
        norms = (mixer.norm.weight, layer.norm.weight, self.norm_f.weight)
        of_layer = triton_search.LayerWeights(weights.in_proj_ED, scan, weights.out_proj_DI, *norms, self.norm_f.eps)
        before, past = (None, 0) if x.prefix is None else (x.prefix.layers[0], x.prefix.length)
        found = triton_search.search_blocks(of_layer, injection_BLE, before, width, search)
        if found is None:
            return None  # the caller then solves the blocks one after another, which locates a non-finite token
        z_BLD, after, blocks = found
        return z_BLD, Prefix((after,), past + injection_BLE.shape[1]), blocks

    def token_stack(self, weights: tuple[Any, ...]) -> Callable[[Tensor, StackInput], Tensor] | None:
        if any(of_layer is None for of_layer in weights):
            return None
        mixer, first = cast(Mamba2Layer, self.layers[0]).mixer, cast(Mamba2Weights, weights[0])
        sizes = (mixer.head_dim, mixer.groups, mixer.state_size)
        products, taps = (first.in_proj_ED, first.out_proj_DI), first.conv_CK.shape[1]
        if not token_stack_runs_on_triton(*products, sizes, taps):
            return None
        from implicit_llm.models.mamba2.triton import decode

        layers = [_token_layer(*pair) for pair in zip(self.layers, weights, strict=True)]  # type: ignore[arg-type]
        stack, norm = decode.Mamba2TokenStack(layers, sizes, self.norm_f.eps), self.norm_f

        def evaluate(z_11D: Tensor, x: StackInput) -> Tensor:
            assert x.injection_BLE is not None
            assert x.prefix is not None
            return norm(stack(z_11D, x.injection_BLE, x.prefix.layers))

        return evaluate


def _token_layer(layer: Mamba2Layer, weights: Mamba2Weights) -> "Mamba2TokenLayer":
    from implicit_llm.models.mamba2.triton.decode import Mamba2TokenLayer

    mixer, bias_C = layer.mixer, layer.mixer.conv1d.bias
    assert bias_C is not None
    scan = ScanWeights(weights.conv_CK, bias_C, mixer.dt_bias, weights.A_H, mixer.D)
    return Mamba2TokenLayer(layer.norm.weight, weights.in_proj_ED, scan, mixer.norm.weight, weights.out_proj_DI)


class ImplicitMamba2ForCausalLM(RecurrentForCausalLM):
    """A Mamba2 language model, explicit or implicit."""

    config_class = ImplicitMamba2Config
    config: ImplicitMamba2Config
    model_class = ImplicitMamba2Model
    backbone: ImplicitMamba2Model
    _no_split_modules = ["Mamba2Layer"]  # noqa: RUF012 (an instance variable in transformers)
