"""Define the Llama block, explicit or implicit: rotary attention and a SwiGLU MLP, each with pre-norm and residual.

Shapes: `B` batch, `L` length, `S` earlier tokens, `D` model, `H` heads (there may be fewer of keys and values than of
queries), `P` head width, `O` all query heads, `M` MLP width (2 M in gate_up), `E` query, key and value side by side.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_llm.kernels.norm import Branch
from implicit_llm.kernels.selection import MAX_WIDTH, token_products_run_on_triton
from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import Layer, Projection, RMSNorm, touched_module
from implicit_llm.models.llama3.attention import Room, attend, room_attention, rotated_heads, swiglu
from implicit_llm.models.stack import LayerState, Mixed, StackInput

ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@strict
class ImplicitLlama3Config(ImplicitConfig):
    """The configuration of Llama blocks: rotary attention and a SwiGLU MLP, each with pre-norm and residual.

    intermediate_size: SwiGLU width; the published sizes use int(2/3 * 4 * hidden_size), which is odd at 1.3B.
    num_key_value_heads: number of heads of keys and values, each shared by a group of query heads; None means one for
        each query head.
    head_dim: width of a head; None means hidden_size / num_attention_heads.
    rope_theta: base of the rotary frequencies, which are used unchanged beyond max_position_embeddings.
    rope_scaling: `rope_type` "linear" or "llama3" with its settings, as in Hugging Face's Llama; None means unscaled.
    Source: Touvron et al. 2023; sizes of Schöne et al. 2025.
    """

    model_type = "implicit_llama3"

    vocab_size: int = 50277
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 2048
    max_position_embeddings: int = 2048
    rope_theta: float = 500000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        if (self.head_dim is None and self.hidden_size % self.num_attention_heads) or self.head_width % 2:
            raise ModelConfigError(
                f"num_attention_heads: {self.num_attention_heads} does not divide hidden_size {self.hidden_size} "
                "into heads of even width"
                if self.head_dim is None
                else f"head_dim: {self.head_dim} is odd, and rotary positions turn pairs; choose an even width"
            )
        self.num_key_value_heads = self.key_value_heads  # adapters compute with this field
        if self.num_attention_heads % self.key_value_heads:
            raise ModelConfigError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide the {self.num_attention_heads} query "
                "heads; choose a divisor"
            )
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)
        super().__post_init__(**kwargs)

    @property
    def head_width(self) -> int:
        """The width of a head: `head_dim`, by default hidden_size / num_attention_heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """The number of heads of keys and of values: `num_key_value_heads`, by default one for each query head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def injection_width(self) -> int:
        """The width of query, key and value together, which is also that of the injection."""
        return (self.num_attention_heads + 2 * self.key_value_heads) * self.head_width


def _check_rope_scaling(scaling: dict[str, Any]) -> None:
    kind = scaling.get("rope_type")
    if kind not in ROPE_SCALINGS:
        raise ModelConfigError(
            f"rope_scaling.rope_type: {kind!r} is not supported, only {' and '.join(ROPE_SCALINGS)}; "
            "use another checkpoint"
        )
    wrong = sorted(scaling.keys() ^ {"rope_type", *ROPE_SCALINGS[kind]})
    if wrong:
        raise ModelConfigError(
            f"rope_scaling.{wrong[0]}: {kind} has exactly the settings {', '.join(ROPE_SCALINGS[kind])}"
        )


class Llama3Weights(NamedTuple):
    """The effective weights of one layer for one forward pass; None replaces them if the modules are called instead."""

    qkv_ED: Tensor
    o_proj_DO: Tensor
    gate_up_MD: Tensor
    down_DM: Tensor


def rope_tables(
    position_ids_BL: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, L, P/2) of the rotary angles position * theta^(-2i/P) in `dtype`, fp32 or fp64.

    Args: scaling changes the frequencies theta^(-2i/P); see `ImplicitLlama3Config.rope_scaling`.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BL.device, dtype=dtype) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = position_ids_BL.to(dtype).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divide the frequencies by the factor: all (`linear`), or the low ones with a smooth transition (`llama3`)."""
    slow = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the trained context
    return torch.lerp(slow, frequencies, ((turns - low) / (high - low)).clamp(0, 1))


def residual_scale(config: ImplicitLlama3Config) -> float:
    """Return the initial scale of the two branches that each layer adds to the residual stream, as in GPT-2."""
    return (2 * config.num_hidden_layers) ** -0.5


class Attention(nn.Module):
    """Causal attention with grouped queries; the injection is added to query, key and value before rotation."""

    def __init__(self, config: ImplicitLlama3Config) -> None:
        super().__init__()
        self.heads, self.key_value_heads = config.num_attention_heads, config.key_value_heads
        width, query = config.hidden_size, self.heads * config.head_width
        key = self.key_value_heads * config.head_width
        normed = config.has_weight_norm
        self.q_proj = Projection((query, width), weight_norm=normed)
        self.k_proj = Projection((key, width), weight_norm=normed)
        self.v_proj = Projection((key, width), weight_norm=normed)
        self.o_proj = Projection((width, query), weight_norm=normed, init_scale=residual_scale(config))

    def forward(
        self, u_BLD: Tensor, weights: Llama3Weights | None, x: StackInput, state: LayerState | None, return_state: bool
    ) -> Mixed:
        """Return the branch (B, L, D), and the keys and values after the block (None without `return_state`).

        state: the keys and values (B, H, S, P) of earlier tokens; None without any. If they are in a room
            (`x.prefix.position`), those of the block are written into it in place.
        """
        assert x.rope is not None
        if weights is None:
            qkv_BLE = torch.cat([self.q_proj(u_BLD), self.k_proj(u_BLD), self.v_proj(u_BLD)], dim=-1)
        else:
            qkv_BLE = F.linear(u_BLD, weights.qkv_ED)
        if state is not None and x.prefix is not None and x.prefix.position is not None:  # the state has room
            room = Room(state[0], state[1], x.prefix.position, x.prefix.seen_LS)
            out_BLD = room_attention(qkv_BLE, x.injection_BLE, x.rope, room)
        else:
            q, k, v = rotated_heads(qkv_BLE, x.injection_BLE, x.rope, self.heads, self.key_value_heads)
            if state is not None:
                k, v = torch.cat([state[0], k], dim=2), torch.cat([state[1], v], dim=2)
            mask, is_causal = x.attention_mask, x.attention_mask is None and q.shape[2] > 1
            out = attend(q, k, v, mask, is_causal=is_causal)
            out_BLD, state = out.transpose(1, 2).flatten(2), (k, v)
        out_BLD = self.o_proj(out_BLD) if weights is None else F.linear(out_BLD, weights.o_proj_DO)
        return out_BLD, state if return_state else None


class Mlp(nn.Module):
    """The SwiGLU MLP, down(silu(gate(u)) * up(u))."""

    def __init__(self, config: ImplicitLlama3Config) -> None:
        super().__init__()
        width, inner, normed = config.hidden_size, config.intermediate_size, config.has_weight_norm
        self.gate_proj = Projection((inner, width), weight_norm=normed)
        self.up_proj = Projection((inner, width), weight_norm=normed)
        self.down_proj = Projection((width, inner), weight_norm=normed, init_scale=residual_scale(config))

    def forward(self, u_BLD: Tensor, weights: Llama3Weights | None) -> Tensor:
        if weights is None:
            return self.down_proj(swiglu(torch.cat([self.gate_proj(u_BLD), self.up_proj(u_BLD)], dim=-1)))
        return F.linear(swiglu(F.linear(u_BLD, weights.gate_up_MD)), weights.down_DM)


class Llama3Layer(Layer):
    """A layer that computes h + attention(norm(h)) and then h + mlp(norm(h))."""

    def __init__(self, config: ImplicitLlama3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, feeds_products=True)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, feeds_products=True)
        self.mlp = Mlp(config)

    def weights(self) -> Llama3Weights | None:
        if touched_module(self) is not None:
            return None
        attn, mlp = self.self_attn, self.mlp
        qkv = torch.cat([proj.effective_weight() for proj in (attn.q_proj, attn.k_proj, attn.v_proj)])
        gate_up = torch.cat([mlp.gate_proj.effective_weight(), mlp.up_proj.effective_weight()])
        # The MLP width of the published 1.3B model, 5461, is odd, and GEMM kernels run it at an eighth of their speed.
        # Padding with zeros does not change the result.
        return Llama3Weights(qkv, attn.o_proj.effective_weight(), *pad_mlp(gate_up, mlp.down_proj.effective_weight()))

    def normed(self, h_BLD: Tensor, branch_BLD: Branch | None) -> tuple[Tensor, Tensor]:
        return self.input_layernorm.of_sum(h_BLD, branch_BLD)

    def mixed(
        self, u_BLD: Tensor, x: StackInput, weights: Llama3Weights | None, state: LayerState | None, return_state: bool
    ) -> Mixed:
        return self.self_attn(u_BLD, weights, x, state, return_state)

    def forward(
        self, h_BLD: Tensor, branch_BLD: Branch | None, x: StackInput, index: int, return_state: bool
    ) -> tuple[Tensor, Branch, LayerState | None]:
        h_BLD, branch_BLD, state = super().forward(h_BLD, branch_BLD, x, index, return_state)
        h_BLD, u_BLD = self.post_attention_layernorm.of_sum(h_BLD, branch_BLD)
        return h_BLD, self.mlp(u_BLD, x.weights[index]), state


MLP_MULTIPLE = 64


def pad_mlp(gate_up_MD: Tensor, down_DM: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights whose MLP width is padded with zeros to a multiple of 64, unless it is less than 1024."""
    width = down_DM.shape[1]
    pad = -width % MLP_MULTIPLE
    if pad == 0 or width < 16 * MLP_MULTIPLE:
        return gate_up_MD, down_DM
    gate, up = gate_up_MD.chunk(2)
    return torch.cat([F.pad(gate, (0, 0, 0, pad)), F.pad(up, (0, 0, 0, pad))]), F.pad(down_DM, (0, pad))


class ImplicitLlama3Model(ImplicitModel):
    """A stack of Llama blocks, explicit or iterated to the fixed point."""

    config_class = ImplicitLlama3Config
    config: ImplicitLlama3Config
    base_model_prefix = "model"
    layer_class = Llama3Layer
    _final_norm = "norm"
    norm: RMSNorm
    has_growing_state = True
    _no_split_modules = ["Llama3Layer"]  # noqa: RUF012 (an instance variable in transformers)

    def rope(self, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        config, dtype = self.config, torch.promote_types(self.norm.weight.dtype, torch.float32)
        return rope_tables(position_ids_BL, config.head_width, config.rope_theta, dtype, config.rope_scaling)

    def token_stack(self, weights: tuple[Any, ...]) -> Callable[[Tensor, StackInput], Tensor] | None:
        config = self.config
        if any(of_layer is None for of_layer in weights) or config.key_value_heads != config.num_attention_heads:
            return None
        if config.head_width > MAX_WIDTH or not token_products_run_on_triton(*weights[0]):
            return None
        from implicit_llm.models.llama3.triton.decode import Llama3TokenLayer, Llama3TokenStack

        def of_layer(layer: Llama3Layer, given: Llama3Weights) -> Llama3TokenLayer:
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            return Llama3TokenLayer(norms[0], given.qkv_ED, given.o_proj_DO, norms[1], given.gate_up_MD, given.down_DM)

        layers = [of_layer(*pair) for pair in zip(self.layers, weights, strict=True)]  # type: ignore[arg-type]
        stack, norm = Llama3TokenStack(layers, self.norm.eps), self.norm

        def evaluate(z_11D: Tensor, x: StackInput) -> Tensor:
            assert x.injection_BLE is not None
            assert x.rope is not None
            assert x.prefix is not None
            assert x.prefix.position is not None
            return norm(stack(z_11D, x.injection_BLE, x.rope, x.prefix.layers, x.prefix.position))

        return evaluate


class ImplicitLlama3ForCausalLM(ImplicitForCausalLM):
    """A Llama language model, explicit or implicit."""

    config_class = ImplicitLlama3Config
    config: ImplicitLlama3Config
    base_model_prefix = "model"
    model_class = ImplicitLlama3Model
    model: ImplicitLlama3Model
    _no_split_modules = ["Llama3Layer"]  # noqa: RUF012 (an instance variable in transformers)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (an instance variable in transformers)
