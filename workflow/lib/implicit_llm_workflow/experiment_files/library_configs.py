"""The model configurations that the library ships, read without importing the library (which would import torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.validation import check_keys
from implicit_llm_workflow.project_dirs import package_dir

# Written by save_pretrained beside the model's own fields; they say who wrote the file, not what the model is.
_BOOKKEEPING = ("architectures", "transformers_version", "_name_or_path", "dtype", "auto_map")


def model_fields(name: str, where: str, configs_dir: Path | None = None) -> dict[str, Any]:
    """Identity of a library configuration: its fields without the solver, which belongs to the curriculum.

    Raises: ConfigError that starts with `where` when there is no configuration of this name.
    """
    configs_dir = configs_dir or package_dir() / "configs"
    path = configs_dir / name / "config.json"
    if not path.is_file():
        names = [item.parent.name for item in configs_dir.glob("*/config.json")]
        raise ConfigError(f"{where}: the library has no configuration {name!r}; {nearest(name, names)}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON ({error}); restore the file") from error
    return {key: value for key, value in fields.items() if key != "solver" and key not in _BOOKKEEPING}


def override_fields(fields: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`fields` with `changes`; numbers take the type of what they replace, so that 1 and 1.0 are one identity.

    Raises: ConfigError for a field that the configuration does not have, or a value of another type.
    """
    for key, instead in (("vocab_size", "it follows from the data"), ("solver", "set it in the curriculum")):
        if key in changes:
            raise ConfigError(f"{where}.{key}: cannot be overridden; {instead}")
    check_keys(changes, fields, where)
    return {**fields, **{key: _like(fields[key], value, f"{where}.{key}") for key, value in changes.items()}}


def check_widths(fields: Mapping[str, Any], where: str) -> None:
    """Refuse heads that do not divide the width, which the library would refuse only when training begins.

    Raises: ConfigError that starts with `where`.
    """
    if fields["model_type"] == "implicit_mamba2":
        width, divisor, key = fields["expand"] * fields["hidden_size"], fields["head_dim"], "head_dim"
        if width % divisor:
            raise ConfigError(
                f"{where}.{key}: {divisor} does not divide expand * hidden_size = {width}; choose a divisor"
            )
    elif fields["model_type"] == "implicit_llama3":
        width, divisor, key = fields["hidden_size"], fields["num_attention_heads"], "num_attention_heads"
        if width % divisor or width // divisor % 2:
            raise ConfigError(
                f"{where}.{key}: {divisor} does not divide hidden_size {width} into heads of even width; "
                "choose another number"
            )


def _like(old: Any, new: Any, where: str) -> Any:
    if isinstance(old, bool) or isinstance(new, bool):
        matches = old is None or new is None or type(old) is type(new)
    elif isinstance(old, float) and isinstance(new, int):
        return float(new)
    elif isinstance(old, int) and isinstance(new, float) and new.is_integer():
        return int(new)
    else:
        matches = old is None or new is None or type(old) is type(new)
    if not matches:
        raise ConfigError(f"{where}: {new!r} has the wrong type; give one like {old!r}")
    return new
