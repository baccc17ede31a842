"""Define the base configuration of all families, whose config.json has a flat layout of typed fields.

A config.json in the nested layout of the published code is translated when it is read (published.py). That layout is
never written.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.published import clean_config, is_published
from implicit_llm_contracts.config.solver import SolverConfig

SHIM = Path(__file__).with_name("modeling_implicit.py")
NORM_EPS = 1e-5  # for a family whose configuration has no layer_norm_epsilon


@strict
class ImplicitConfig(PreTrainedConfig):
    """The configuration fields that all families share.

    is_implicit: whether to iterate the layer stack to a fixed point; False is the explicit baseline of the same
        architecture.
    weight_norm: whether to normalise the linear and convolution weights of layers and injection; None means the value
        of is_implicit, as in the published models.
    solver: a `SolverConfig` or a dict of its settings. None means the defaults for an implicit model, and an explicit
        model accepts only None.
    dropout: the rate of variational dropout, with one mask per layer for all iterations of a pass; the paper uses 0.
    initializer_range: the standard deviation of the embedding, and of an untied head, at initialisation.
    """

    # Trainer omits these outputs from predictions, so that compute_metrics gets the logits.
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
        for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, key) < 1:
                raise ModelConfigError(f"{key}: {getattr(self, key)} is not allowed; give an integer of at least 1")
        own = [field.name for field in fields(self)]
        for key in kwargs:  # transformers stores unknown keys as attributes, so a misspelt field would have no effect
            if close := get_close_matches(key, own, n=1, cutoff=0.85):
                raise ModelConfigError(f"{key}: {type(self).__name__} has no such field; did you mean {close[0]!r}?")
        super().__post_init__(**kwargs)
        if self._is_in_shim():
            title = type(self).__name__.removesuffix("Config")
            kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
            self.auto_map = {auto: f"{SHIM.stem}.{title}{kind}" for auto, kind in kinds.items()}

    @classmethod
    def _is_in_shim(cls) -> bool:
        """Return whether SHIM, the module saved with a model, imports this class; it imports no class of a user."""
        return cls.__module__.startswith(f"{__package__}.")

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration and, for a class of this package, the module that `auto_map` names."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self._is_in_shim():
            shutil.copyfile(SHIM, Path(save_directory) / SHIM.name)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, because transformers would copy part of this package's source into the folder of the model."""

    def __setattr__(self, key: str, value: Any) -> None:
        """Set a field; a dict of solver settings changes only these settings of an existing solver.

        Raises: ModelConfigError for a solver of an explicit model, for the removal of the solver of an implicit model,
            and for a change of is_implicit; ConfigError for invalid solver settings.
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
        """The width of the injection, which the layers add to their in-projections."""
        return self.hidden_size

    @property
    def norm_eps(self) -> float:
        """The epsilon of the injection's norm and of the final norm."""
        return getattr(self, "layer_norm_epsilon", NORM_EPS)

    @property
    def has_weight_norm(self) -> bool:
        """The value of `weight_norm`, which is never None after initialisation."""
        return bool(self.weight_norm)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration from our flat layout or the published one; fields in `kwargs` replace the saved ones.

        Fields of this package are replaced before the configuration is created, so that its checks apply to them. A
        dict for `solver` changes only the settings that it names.
        """
        values = clean_config(config_dict) if is_published(config_dict) else config_dict
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        changed = {key: kwargs.pop(key) for key in own & kwargs.keys()}
        return super().from_dict(replaced(values, changed), **kwargs)


def replaced(saved: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved fields with `changed` applied; a dict for `solver` changes only the settings that it names."""
    values = {**saved, **changed}
    if isinstance(changed.get("solver"), Mapping) and saved.get("solver"):
        values["solver"] = SolverConfig.of(changed["solver"], SolverConfig.of(saved["solver"]))
    return values
