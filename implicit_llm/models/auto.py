"""Register the models with the Auto classes; find the package's configurations and trained models by name."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from implicit_llm.models.backbone import RecurrentModel
from implicit_llm.models.causal_lm import RecurrentForCausalLM
from implicit_llm.models.configuration import ImplicitConfig, replaced
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import RecurrentLayer
from implicit_llm.models.llama3.model import ImplicitLlama3Config, ImplicitLlama3ForCausalLM, ImplicitLlama3Model
from implicit_llm.models.lstm import LstmConfig, LstmForCausalLM
from implicit_llm.models.mamba2.model import ImplicitMamba2Config, ImplicitMamba2ForCausalLM, ImplicitMamba2Model
from implicit_llm_contracts.config.flops import FAMILIES
from implicit_llm_contracts.config.registry import InvalidEntry, NameTaken
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest

CONFIGS = Path(__file__).parent.parent / "configs"  # one directory per configuration
TRAINED = CONFIGS.with_name("trained")  # one directory per trained model
FAMILIES.update(
    implicit_mamba2=(ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM),
    implicit_llama3=(ImplicitLlama3Config, ImplicitLlama3Model, ImplicitLlama3ForCausalLM),
)


def register_implicit_causal_lm() -> None:
    """Register all families, including users' families, and the baseline `lstm` with the Auto classes.

    The LSTM has no `AutoModel`. Repeated calls change nothing.
    """
    for config_class, model_class, causal_lm_class in filter(None, FAMILIES.values()):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_lm_class, exist_ok=True)
    AutoConfig.register(LstmConfig.model_type, LstmConfig, exist_ok=True)
    AutoModelForCausalLM.register(LstmConfig, LstmForCausalLM, exist_ok=True)


def register_family(name: str, config: type[ImplicitConfig], layer: type[RecurrentLayer]) -> type[RecurrentForCausalLM]:
    """Register the family `name` with the Auto classes: explicit and implicit models with layers of the class `layer`.

    Everything else is the same as in the built-in families: embedding, injection, solver, loss, generation and saving.
    Call this function before you load such a model. A second call with the same name replaces the family.
    Args: config is a class with `model_type = name` and the fields that `layer(config)` uses.
    Returns: the class of the family's language models.
    Raises: NameTaken for a model type of this package or of transformers; InvalidEntry if a class has the wrong base or
        the layer has no `mix`; ModelConfigError if `config` has another `model_type`.
    """
    if not (isinstance(config, type) and issubclass(config, ImplicitConfig)):
        raise InvalidEntry(f"model family {name!r}: config must be a subclass of ImplicitConfig, not {config!r}")
    if not (isinstance(layer, type) and issubclass(layer, RecurrentLayer)) or layer.mix is RecurrentLayer.mix:
        raise InvalidEntry(f"model family {name!r}: layer must be a subclass of RecurrentLayer with mix, not {layer!r}")
    if config.model_type != name:
        raise ModelConfigError(f"model_type: {config.__name__} has {config.model_type!r}; set it to {name!r}")
    if name in CONFIG_MAPPING and name not in FAMILIES:
        raise NameTaken(f"model family {name!r} is a model type of transformers; choose another name")
    title = config.__name__.removesuffix("Config")
    shared = {"config_class": config, "_no_split_modules": [layer.__name__], "__module__": config.__module__}
    model = type(f"{title}Model", (RecurrentModel,), {**shared, "layer_class": layer})
    causal_lm = type(f"{title}ForCausalLM", (RecurrentForCausalLM,), {**shared, "model_class": model})
    FAMILIES.add(name, (config, model, causal_lm))
    register_implicit_causal_lm()
    return causal_lm


def list_configs() -> list[str]:
    """Return the names that `load_config` accepts, for example "mamba2-130m-implicit"."""
    return sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))


def load_config(name: str, **overrides: Any) -> ImplicitConfig:
    """Return the configuration called `name` with `overrides`; a dict for `solver` changes only the settings it names.

    Raises: ModelConfigError for an unknown name or field (the message names a similar one, or how to find the valid
        ones); ConfigError for invalid solver settings.
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
    return type(config)(**replaced(known, overrides))


def trained_model(name: str | Path) -> Path:
    """Return the directory from which `from_pretrained` loads a trained model; its README.md is the model card.

    name: a model of the package, such as "s5-state-passing-s0", or the directory of a finished run, such as
        "results/demo/train/a5-implicit-s1/free".
    Raises: ModelConfigError for any other name, and for a finished run without a model; ManifestError if the run's
        manifest is damaged.
    """
    run = Path(name)
    if (run / MANIFEST).is_file():
        folder = Manifest.read(run / MANIFEST).model_folder
        if folder is None:
            raise ModelConfigError(f"{run}: is a job without a model; give the run directory of a training phase")
        return run / folder
    known = sorted(path.parent.name for path in TRAINED.glob("*/config.json"))
    if str(name) not in known:
        if run.is_dir():
            raise ModelConfigError(
                f"{run}: has no {MANIFEST}, so the run has not finished; `implicit-llm status` says why"
            )
        hint = nearest(str(name), known, f"there are {', '.join(known)}, and run directories of training phases")
        raise ModelConfigError(f"no trained model is called {str(name)!r}; {hint}")
    return TRAINED / name
