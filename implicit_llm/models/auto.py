"""The models under Hugging Face's Auto classes, and the configurations and trained models of the package, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from implicit_llm.models.backbone import ImplicitLlama3Model, ImplicitMamba2Model
from implicit_llm.models.causal_lm import ImplicitLlama3ForCausalLM, ImplicitMamba2ForCausalLM
from implicit_llm.models.configuration import ImplicitConfig, ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.lstm import LstmConfig, LstmForCausalLM
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.places import PROJECT_DIR

CONFIGS = Path(__file__).parent.parent / "configs"  # a directory for each configuration
TRAINED = PROJECT_DIR / "results" / "reference" / "weights"
FAMILIES = (
    (ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM),
    (ImplicitLlama3Config, ImplicitLlama3Model, ImplicitLlama3ForCausalLM),
)


def register_implicit_causal_lm() -> None:
    """Register implicit_mamba2, implicit_llama3 and the baseline lstm with the Auto classes; idempotent."""
    for config_class, model_class, causal_lm_class in FAMILIES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_lm_class, exist_ok=True)
    AutoConfig.register(LstmConfig.model_type, LstmConfig, exist_ok=True)
    AutoModelForCausalLM.register(LstmConfig, LstmForCausalLM, exist_ok=True)


def list_configs() -> list[str]:
    """Names that `load_config` knows, for example "mamba2-130m-implicit"."""
    return sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))


def load_config(name: str, **overrides: Any) -> ImplicitConfig:
    """The configuration of that name, with fields replaced by `overrides`.

    Raises: ModelConfigError for a name or a field that does not exist, naming the nearest one that does.
    """
    if name not in list_configs():
        hint = nearest(name, list_configs(), "implicit_llm.list_configs() names them all")
        raise ModelConfigError(f"no configuration is called {name!r}; {hint}")
    directory = CONFIGS / name
    known = json.loads((directory / "config.json").read_text())
    config = AutoConfig.from_pretrained(directory)
    for key in overrides:
        if key not in known and not hasattr(config, key):
            hint = nearest(key, config.to_dict(), f"its fields are {', '.join(sorted(known))}")
            raise ModelConfigError(f"{key}: {name} has no such field; {hint}")
    return type(config)(**{**known, **overrides})


def trained_model(name: str) -> Path:
    """The directory of a trained model, for `from_pretrained`: "s5-implicit-s0" or "a5-monoid-released-s0".

    Its README.md is the model card. Raises: ModelConfigError for any other name.
    """
    known = sorted(path.parent.name for path in TRAINED.glob("*/config.json"))
    if name not in known:
        hint = nearest(name, known, f"there are {', '.join(known)}")
        raise ModelConfigError(f"no trained model is called {name!r}; {hint}")
    return TRAINED / name
