"""Configurations of the two families: flat, typed fields that `AutoConfig` reads and writes.

The published nested layout is translated on reading (published.py) and never written.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.published import clean_config, is_published
from implicit_llm_contracts.config.solver import SolverConfig

SHIM = Path(__file__).with_name("modeling_implicit.py")
NORM_EPS = 1e-5  # of a family whose configuration has no layer_norm_epsilon
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@strict
class ImplicitConfig(PreTrainedConfig):
    """Fields that both families share.

    is_implicit: iterate the layer stack to a fixed point; False is the explicit baseline of the same architecture.
    weight_norm: weight normalisation on linear and convolution weights; None means "as is_implicit", as published.
    solver: a `SolverConfig`, also given as a dict of its settings; None for explicit models.
    dropout: variational, one mask for all iterations of a forward pass; the paper trains without.
    initializer_range: standard deviation of the embedding at initialisation.
    """

    # What Trainer leaves out of predictions, so that compute_metrics gets the logits.
    keys_to_ignore_at_inference = ["past_key_values", "solver_stats", "last_hidden_state"]  # noqa: RUF012 (no field)

    vocab_size: int = 50288
    hidden_size: int = 768
    num_hidden_layers: int = 24
    is_implicit: bool = True
    weight_norm: bool | None = None
    solver: dict[str, Any] | SolverConfig | None = None
    dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.weight_norm is None:
            self.weight_norm = self.is_implicit
        if self.is_implicit:
            self.solver = self.solver or {}
        if not 0 <= self.dropout < 1:
            raise ModelConfigError(f"dropout: {self.dropout!r} is not in [0, 1)")
        super().__post_init__(**kwargs)
        if self._is_in_shim():
            title = type(self).__name__.removesuffix("Config")
            kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
            self.auto_map = {auto: f"{SHIM.stem}.{title}{kind}" for auto, kind in kinds.items()}

    @classmethod
    def _is_in_shim(cls) -> bool:
        """Whether the module that is saved beside a model has its classes: those of this package, not a user's."""
        return cls.__module__ == __name__

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration, and beside it the module that `auto_map` names."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self._is_in_shim():
            shutil.copyfile(SHIM, Path(save_directory) / SHIM.name)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy part of this package's source beside the saved model."""

    def __setattr__(self, key: str, value: Any) -> None:
        """Set a field; a dict of solver settings changes those of the solver that is there, and keeps the others.

        Raises: ModelConfigError for a solver that an explicit model would ignore or an implicit one lacks.
        """
        before = self.__dict__.get("solver")
        if key == "solver":
            if value is None and before is not None:
                raise ModelConfigError("solver: an implicit model needs one; give its settings")
            if value is not None and not self.is_implicit:
                raise ModelConfigError("solver: an explicit model (is_implicit false) has no solver; remove the key")
            value = None if value is None else SolverConfig.of(value, before)
        elif key == "is_implicit" and value != self.__dict__.get(key, value):
            raise ModelConfigError("is_implicit: fixed once the configuration is made; use implicit_llm.to_implicit")
        super().__setattr__(key, value)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return values | {"solver": self.solver.to_dict()} if isinstance(self.solver, SolverConfig) else values

    @property
    def injection_width(self) -> int:
        """Width of what the layers add to their in-projections."""
        return self.hidden_size

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms around and between the layers."""
        return getattr(self, "layer_norm_epsilon", NORM_EPS)

    @property
    def has_weight_norm(self) -> bool:
        """`weight_norm`, which is never None once the configuration is made."""
        return bool(self.weight_norm)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the clean layout, or translate the published one. Fields in `kwargs` replace those that were saved.

        They are replaced before the configuration is made, so that it checks them as it checks its own.
        """
        values = clean_config(config_dict) if is_published(config_dict) else config_dict
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        changed = {key: kwargs.pop(key) for key in own & kwargs.keys()}
        return super().from_dict(replaced(values, changed), **kwargs)


def replaced(saved: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields with some of them changed; of the solver those settings that a dict names."""
    values = {**saved, **changed}
    if isinstance(changed.get("solver"), Mapping) and saved.get("solver"):
        values["solver"] = SolverConfig.of(changed["solver"], SolverConfig.of(saved["solver"]))
    return values


@strict
class ImplicitMamba2Config(ImplicitConfig):
    """Mamba2 blocks: norm, mixer, residual; no MLP.

    expand * hidden_size is the inner width, divided into heads of head_dim; state_size is the SSM state per head
    channel; conv_kernel the width of the causal convolution; n_groups shares B and C among heads.
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
        """Inner width of the mixer."""
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        return self.intermediate_size // self.head_dim

    @property
    def injection_width(self) -> int:
        """Width of gate, x, B, C and dt together: of the in-projection and of the injection."""
        return 2 * self.intermediate_size + 2 * self.n_groups * self.state_size + self.num_heads


@strict
class ImplicitLlama3Config(ImplicitConfig):
    """Llama blocks: attention with rotary positions and a SwiGLU MLP, each with pre-norm and residual.

    intermediate_size is the SwiGLU width (the published sizes take int(2/3 * 4 * hidden_size), odd at 1.3B).
    num_key_value_heads: heads of keys and values, each shared by a group of query heads; None becomes one a query head.
    head_dim: width of a head; None: hidden_size / num_attention_heads.
    rope_theta is the base of the rotary frequencies; positions beyond max_position_embeddings extrapolate plainly.
    rope_scaling: `rope_type` "linear" or "llama3" with its settings, as in Hugging Face's Llama; None: unscaled.
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
        self.num_key_value_heads = self.key_value_heads  # adapters compute with it
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
        """`head_dim`, by default hidden_size / num_attention_heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """`num_key_value_heads`, by default one for each query head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def injection_width(self) -> int:
        """Width of query, key and value together, and of the injection."""
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
