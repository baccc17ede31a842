"""Define the base class of the models of all families: loading, saving, initialisation and the solver."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import PACKED, REENTRANT, LostGradient, ModelConfigError
from implicit_llm.models.layers import NormedWeight, RMSNorm, touched_module
from implicit_llm.models.published import is_published, read_published_weights
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.fetched_files import CONFIG_FILE
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest

# The arguments by which trl and transformers pass packed documents.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class ImplicitPreTrainedModel(PreTrainedModel):
    """A model of any family, with or without its head: loading, saving, initialisation and the solver."""

    config_class: type[ImplicitConfig]
    config: ImplicitConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    @property
    def solver(self) -> SolverConfig | None:
        """The solver settings, which are saved with the model; None for explicit models.

        Assign a new SolverConfig to change the phase, or a dict to change only the settings that it names. An
        assignment raises ValueError for an explicit model and ConfigError for invalid settings.
        """
        return self.config.solver  # type: ignore[return-value]  # the field also accepts a dict and converts it

    @solver.setter
    def solver(self, solver: SolverConfig | dict[str, Any]) -> None:
        if not self.config.is_implicit:
            raise ValueError(
                "an explicit model has no solver; convert it with implicit_llm.to_implicit(model, solver=...)"
            )
        self.config.solver = solver

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model, also from a run directory or from a local directory in the published layout.

        Raises: ModelConfigError for a quantised implicit model, for a quantisation that replaces no projection, and for
            wrong settings or a damaged pickle in the published layout; FileNotFoundError if it has no weights;
            ManifestError if the manifest of a run directory is damaged.
        """
        path = Path(pretrained_model_name_or_path) if pretrained_model_name_or_path is not None else None
        if path is not None and (path / MANIFEST).is_file():
            pretrained_model_name_or_path = path = path / (Manifest.read(path / MANIFEST).model_folder or "")
        if path is None or not is_published(read_object(path / CONFIG_FILE)):
            return _quantised_or_not(super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs))
        if kwargs.get("config") is None:
            config, kwargs = cls.config_class.from_pretrained(path, **kwargs | {"return_unused_kwargs": True})
            kwargs["config"] = config
        is_safe = bool(kwargs.get("use_safetensors"))
        weights = read_published_weights(path, cls.config_class.model_type, use_safetensors=is_safe)
        has_head = cls.__name__.endswith("ForCausalLM")
        if not has_head or kwargs["config"].tie_word_embeddings:
            weights = {name: value for name, value in weights.items() if not name.startswith("lm_head.")}
        if not has_head:
            weights = {name.removeprefix(f"{cls.base_model_prefix}."): value for name, value in weights.items()}
        return _quantised_or_not(super().from_pretrained(None, *args, state_dict=weights, **kwargs))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the model and, unless the folder has a README.md, a model card that explains how to load it."""
        super().save_pretrained(save_directory, *args, **kwargs)
        from implicit_llm.cards.model_card import FILE_NAME, saved_card

        card = Path(save_directory) / FILE_NAME
        if kwargs.get("is_main_process", True) and card.parent.is_dir() and not card.exists():
            card.write_text(saved_card(self), encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, because transformers would copy part of this package's source into the folder of the model."""

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return "sdpa". Raises: ValueError for another choice, because `kernels.selection` chooses the kernels."""
        if requested_attention not in (None, "sdpa"):
            raise ValueError(
                f"attn_implementation={requested_attention!r} is not supported: choose kernels with "
                "implicit_llm.kernels.selection.select_kernels"
            )
        return "sdpa"

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        self.get_correct_attn_implementation(attn_implementation)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **options: Any) -> None:
        """Turn activation checkpointing on or off.

        Raises: LostGradient for use_reentrant=True with an implicit model; ValueError for every_n_layers above 1.
        """
        how = getattr(args[0] if args else options.get("gradient_checkpointing_func"), "keywords", {})
        if enable and self.config.is_implicit and how.get("use_reentrant"):
            raise LostGradient(REENTRANT)
        if enable and options.get("every_n_layers", 1) != 1:
            raise ValueError("every_n_layers: the whole layer stack is checkpointed in each iteration; leave it out")
        super()._set_gradient_checkpointing(enable, *args, **options)

    def _refuse_qconfig(self, qconfig: Any) -> None:
        raise ModelConfigError(
            "torch.ao.quantization replaces plain nn.Linear modules, so only the head would be quantised; use torchao "
            "(explicit models)"
        )

    qconfig = property(fset=_refuse_qconfig, doc="What quantize_dynamic and prepare of torch set before they work.")

    def refuse_unknown(self, arguments: Mapping[str, Any]) -> None:
        """Raise for arguments that `forward` would ignore, unless they are None: peft passes all that it knows.

        Raises: TypeError, whose message names a similar argument or the valid ones; ValueError for
            `output_attentions=True` and for packed documents.
        """
        for name, value in arguments.items():
            if name in PACKING and value is not None:
                raise ValueError(f"{name}: {PACKED}")
            if name == "output_attentions" and value:
                raise ValueError("output_attentions: attention weights are never held; leave it out")
            if value is not None and name != "output_attentions":
                valid = [known for known in inspect.signature(self.forward).parameters if known != "kwargs"]
                raise TypeError(f"{type(self).__name__} takes no argument {name!r}; {nearest(name, valid)}")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding | nn.Linear) and not isinstance(module, NormedWeight):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _quantised_or_not(loaded: Any) -> Any:
    """Return `loaded`, which is a model or a tuple whose first entry is a model, if its quantisation is supported.

    Raises: ModelConfigError if a quantisation changed no layer, or if the quantised model is implicit.
    """
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if getattr(model, "hf_quantizer", None) is None:
        return loaded
    method = model.hf_quantizer.quantization_config.quant_method
    name = getattr(method, "value", method)
    if model.config.is_implicit:
        raise ModelConfigError(
            f"quantization_config: {name} cannot quantise an implicit model, whose weights are computed from g and v; "
            "leave it out"
        )
    if touched_module(model.base_model.layers) is None:
        raise ModelConfigError(
            f"quantization_config: {name} replaces no projection of {type(model).__name__}, only plain nn.Linear "
            "modules; use torchao, or leave it out"
        )
    return loaded
