"""The named configurations that ship with the library, one directory each under `implicit_llm/configs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.hints import nearest

CONFIGS = Path(__file__).parent.parent / "configs"


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
