"""Causal language models of other packages, and those that others saved."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.errors import ConfigError


def import_package_of(fields: Mapping[str, Any]) -> None:
    """Import the package that registers a model's type with transformers, if its fields name one in `package`.

    Raises: ModelConfigError.
    """
    package = fields.get("package")
    if package is not None:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ModelConfigError(f"package {package} cannot be imported ({error}); install it") from error


@contextmanager
def load_errors() -> Iterator[None]:
    """Say in one line, as ModelConfigError, that what is loaded here is no causal language model."""
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
    """The model in a folder, every weight of which is there; nothing is fetched, and no code beside it is run.

    Args: use_safetensors False also reads the tensors of a pickle, in the published layout.
    Raises: ModelConfigError, one line without the folder, for what is no whole causal language model.
    """
    how: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": False,  # and no question at a terminal
        "use_safetensors": use_safetensors or None,
        "output_loading_info": True,
        # Weights of another shape are reported with those that are missing, instead of being an error of their own.
        "ignore_mismatched_sizes": True,
    }
    with load_errors():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    model, loading = loaded
    lost = sorted({*loading["missing_keys"], *(name for name, *_ in loading.get("mismatched_keys") or ())})
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ModelConfigError(
            f"its weights lack {lost[0]}{more}, as config.json wants it; it would be drawn at random: "
            "give a whole checkpoint of a causal language model"
        )
    return model
