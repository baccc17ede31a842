"""Load causal language models from folders without running their code; convert explicit models to implicit ones."""

import copy
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import NormedWeight, gain_of
from implicit_llm.models.llama3.loading import from_llama
from implicit_llm.models.mamba2.loading import from_mamba2
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.errors import ConfigError

FROM_TRANSFORMERS = {"llama": from_llama, "mamba2": from_mamba2}


def import_package_of(fields: Mapping[str, Any]) -> None:
    """Import the package that registers a model's type with transformers, if `fields["package"]` names one.

    Raises: ModelConfigError if it cannot be imported.
    """
    package = fields.get("package")
    if package is not None:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ModelConfigError(f"{package} cannot be imported ({error}); install it") from error


@contextmanager
def load_errors() -> Iterator[None]:
    """Raise ModelConfigError with one line instead of a loading error in this context; the caller adds the folder."""
    try:
        yield
    except ModelConfigError:
        raise
    except (ConfigError, ValueError, TypeError, OSError, KeyError, SafetensorError) as error:
        raise ModelConfigError(
            f"is no causal language model that can be loaded ({' '.join(str(error).split())[:200]}); "
            "give another checkpoint"
        ) from error


def load_foreign(
    folder: Path, *, dtype: torch.dtype | Literal["auto"] = torch.float32, use_safetensors: bool = True
) -> PreTrainedModel:
    """Load the causal language model in a folder, which must have all weights; download nothing and run no code of it.

    Args: dtype: "auto" means the dtype of the checkpoint. use_safetensors: if False, a folder without safetensors may
        have a pickle, but only its tensors are read.
    Raises: ModelConfigError, in one line without the folder, if this is not a complete causal language model.
    """
    how: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": False,  # without a value, transformers would prompt at a terminal
        "use_safetensors": use_safetensors or None,
        "output_loading_info": True,
        # With this, transformers lists weights of a wrong shape in the loading info instead of raising an error.
        "ignore_mismatched_sizes": True,
    }
    with load_errors():
        _check_sizes(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    model, loading = loaded
    lost = sorted({*loading["missing_keys"], *(name for name, *_ in loading.get("mismatched_keys") or ())})
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ModelConfigError(
            f"its weights lack {lost[0]}{more}, as config.json wants it; it would be drawn at random: "
            "give a whole checkpoint of a causal language model"
        )
    surplus = _surplus_layer(model, loading["unexpected_keys"])
    if surplus is not None:
        raise ModelConfigError(
            f"its weights have {surplus}, but config.json describes no such layer; correct its number of layers"
        )
    return model


def _surplus_layer(model: PreTrainedModel, names: Iterable[str]) -> str | None:
    """Return the first of the unexpected `names` whose layer would follow the model's last layer; None if none would.

    Other unexpected tensors are valid: buffers of older versions, layers that predict further tokens, and parts that
    the class omits.
    """
    extra = range((getattr(model.config, "num_nextn_predict_layers", None) or 0) + 1)
    layers = {place for name in model.state_dict() if (place := _place(model, name)) is not None}
    for name in sorted(names):
        stack, number = _place(model, name) or (None, 0)
        if (stack, 0) in layers and not any((stack, number - count) in layers for count in extra):
            return name
    return None


def _place(model: PreTrainedModel, name: str) -> tuple[str, int] | None:
    """Return name and number of a weight's layer, such as ("layers.", 3); None for a weight outside of layers."""
    found = re.match(r"(.*?)(\d+)\.", name.removeprefix(f"{model.base_model_prefix}."))
    return None if found is None else (found[1], int(found[2]))


def _check_sizes(config: PreTrainedConfig) -> None:
    """Raise ModelConfigError for a size below 1, with which transformers loads a model without layers or crashes."""
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = getattr(config.get_text_config(), key, None)
        if isinstance(value, int) and value < 1:
            name = config.attribute_map.get(key, key)
            raise ModelConfigError(f"config.json: {name}: {value} is not allowed; give an integer of at least 1")


@torch.no_grad()
def to_implicit(model: PreTrainedModel, solver: SolverConfig | Mapping[str, Any] | None = None) -> ImplicitForCausalLM:
    """Return a new implicit model with the layers of an explicit model of this package, or of transformers.

    From transformers, `model` may be a Llama or Mamba2. The injection is newly initialised. Weight normalisation splits
    each weight of the layers into g = ||v|| and v, so every layer still computes the same function. The whole model
    computes another one, because its layers now get the iterate z and the injection instead of the embedding. You must
    train it: call `train()` first, because the new model starts in the mode of `model`, and `from_pretrained` gives
    evaluation mode. solver: None means the defaults of SolverConfig.
    Raises: TypeError for a model of another family; ModelConfigError for a setting that our layers do not support;
        ValueError for an implicit model; ConfigError for invalid solver settings.
    """
    if not isinstance(model, ImplicitForCausalLM):
        convert = FROM_TRANSFORMERS.get(getattr(getattr(model, "config", None), "model_type", ""))
        if convert is None:
            raise TypeError(
                f"to_implicit takes an explicit model of implicit_llm, or a Llama or Mamba2 of transformers, got "
                f"{type(model).__name__}; give one of these"
            )
        model = convert(model)
    if model.config.is_implicit:
        raise ValueError("the model is implicit already; assign model.solver to change how it is solved")
    values = model.config.to_dict() | {
        "is_implicit": True,
        "weight_norm": True,
        "solver": solver or SolverConfig(),
    }
    implicit = type(model)(type(model.config)(**values))
    implicit.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]  # transformers' wrapper loses its self
    weights = model.state_dict()
    for name, module in implicit.named_modules():
        if isinstance(module, NormedWeight) and (weight := weights.pop(f"{name}.weight", None)) is not None:
            gain = gain_of(weight)
            # A row of zeros has no direction; any other v is as good, because its gain is 0.
            weights |= {f"{name}.v": torch.where(gain == 0, 1.0, weight), f"{name}.g": gain}
    implicit.load_state_dict(weights, strict=False)
    implicit.generation_config = copy.deepcopy(model.generation_config)
    return implicit.train(model.training)
