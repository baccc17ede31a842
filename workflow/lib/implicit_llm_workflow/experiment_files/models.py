"""Read workflow/config/models/*.yaml and the library's config.json files without the library, which imports torch."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from implicit_llm_contracts.config.fill import as_number, fill
from implicit_llm_contracts.config.values import Commit, Text, matching
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest, ManifestError
from implicit_llm_contracts.runs.places import local_folder
from implicit_llm_workflow.experiment_files.yaml_files import check_keys
from implicit_llm_workflow.project_dirs import package_dir

_MAX_INTEGER = 1 << 31  # far above any size or position of a model
# save_pretrained adds these fields; they describe the program that wrote the file, not the model.
_BOOKKEEPING = ("architectures", "transformers_version", "_name_or_path", "dtype", "auto_map")


@dataclass(frozen=True)
class PretrainedModel:
    """A file workflow/config/models/<name>.yaml of any Hugging Face causal model; training starts from its weights.

    `pretrained`: a folder (below the downloads or the working directory), or a name on the hub, which needs `revision`.
    """

    pretrained: Text
    revision: Commit | None = None

    def fields(self, path: str) -> dict[str, Any]:
        """Return the model as the training job receives it. Raises: ConfigError."""
        name, folder = self.pretrained, local_folder(Path(self.pretrained))
        if (folder is not None) != (self.revision is None):
            raise ConfigError(
                f"{path}: revision: {name} is a folder, which has no revision; remove the key"
                if folder is not None
                else f"{path}: revision: {name} is no folder; correct the name, or add the commit of a model of the "
                f"hub, which `git ls-remote https://huggingface.co/{name} HEAD` prints"
            )
        with suppress(ManifestError):
            # A run directory would load, but the identity of the job would have no digest of its weights.
            if folder is not None and (model := Manifest.read(folder / MANIFEST).model_folder) is not None:
                raise ConfigError(f"{path}: pretrained: {name} is a run directory; give {Path(name, model)}")
        return {"pretrained": name} | ({} if self.revision is None else {"revision": self.revision})


@dataclass(frozen=True)
class ConfiguredModel:
    """A file workflow/config/models/<name>.yaml of a model that is initialised from the seed of its run.

    `config`: the name of a configuration of the library, which is a folder of implicit_llm/configs/, or the fields of
    any Hugging Face configuration with its model_type. `package`: a Python package that registers this model_type with
    transformers. `override`: fields of the configuration that differ; vocab_size follows from the data, the solver from
    the curriculum.
    """

    config: str | dict[str, Any]
    package: Annotated[str, matching(r"[A-Za-z_]\w*([.][A-Za-z_]\w*)*", "the name of a Python package")] | None = None
    override: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.config, dict) and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config: the key 'model_type' is missing; add it, or name a configuration of the library")

    def fields(self, path: str) -> dict[str, Any]:
        """Return the model as the training job receives it. Raises: ConfigError."""
        found = model_fields(self.config, f"{path}: config") if isinstance(self.config, str) else dict(self.config)
        _check_family(found, f"{path}: config")
        if self.package is not None:
            found["package"] = self.package
        return override_fields(found, self.override, f"{path}: override")


def fill_model(values: Mapping[str, Any], path: str) -> PretrainedModel | ConfiguredModel:
    """Return the model of a file's values. Raises: ConfigError."""
    return fill(PretrainedModel, values, path) if "pretrained" in values else fill(ConfiguredModel, values, path)


def model_fields(name: str, where: str) -> dict[str, Any]:
    """Return the fields of a library configuration without bookkeeping and without the solver, which a curriculum sets.

    Raises: ConfigError that starts with `where` if there is no configuration with this name.
    """
    configs_dir = package_dir() / "configs"
    path = configs_dir / name / "config.json"
    if not os.path.isfile(path):  # false also for a name that is too long for any file
        names = [item.parent.name for item in configs_dir.glob("*/config.json")]
        raise ConfigError(f"{where}: the library has no configuration {name!r}; {nearest(name, names)}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON ({error}); restore the file") from error
    return {key: value for key, value in fields.items() if key != "solver" and key not in _BOOKKEEPING}


def override_fields(fields: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `fields` with `changes`; numbers get the type of the old value, so that 1 and 1.0 give one identity.

    Raises: ConfigError for vocab_size, solver, a field that the configuration lacks, or a value of another type.
    """
    for key, instead in (("vocab_size", "it follows from the data"), ("solver", "set it in the curriculum")):
        if key in changes:
            raise ConfigError(f"{where}.{key}: cannot be overridden; {instead}")
    check_keys(changes, fields, where)
    return {**fields, **{key: _like(fields[key], value, f"{where}.{key}") for key, value in changes.items()}}


# For each family of the library: one of its configurations, and the fields that it needs besides those of all families.
_FAMILIES = {
    "implicit_mamba2": ("mamba2-130m-explicit", ("expand", "head_dim", "state_size", "n_groups", "conv_kernel")),
    "implicit_llama3": ("llama3-130m-explicit", ("num_attention_heads", "intermediate_size")),
}


def _check_family(fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a model of the library has an unknown field or lacks a field that its family needs."""
    if fields["model_type"] not in _FAMILIES:
        return  # transformers, which is not imported here, checks the fields when training starts
    config, own = _FAMILIES[fields["model_type"]]
    check_keys(fields, [*model_fields(config, where), "weight_norm"], where)
    for key in ("is_implicit", "hidden_size", "num_hidden_layers", *own):
        if key not in fields:
            raise ConfigError(f"{where}: the key {key!r} is missing; add it, or name the configuration {config}")


# The names of sizes in configurations of Hugging Face; integer fields with other names may be 0 or -1.
_SIZE = re.compile(
    "(hidden|intermediate|ffn_hidden|state)_size|d_model|n_embd|emb_dim|n_inner|n_positions|"
    "max_position_embeddings|(n|num|num_hidden|num_decoder|decoder)_layers?|"
    "(n|num|num_attention|num_key_value|decoder_attention)_heads?"
)


def check_widths(fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, which starts with `where`, for sizes below 1 or for heads that do not fit the width.

    The sizes are checked because a model without layers would train without an error. In the library's own models,
    each size must be an integer, and the heads must fit: `head_dim` divides `expand * hidden_size` in Mamba2;
    `num_attention_heads` divides `hidden_size` into heads of even width in Llama3.
    """
    is_ours = fields["model_type"] in _FAMILIES
    sizes = ("hidden_size", "num_hidden_layers", *_FAMILIES[fields["model_type"]][1]) if is_ours else ()
    for key, value in fields.items():
        is_size = type(value) is int and (not key.endswith("_token_id") if is_ours else _SIZE.fullmatch(key))
        if (is_size and value < 1) or (key in sizes and not is_size):
            raise ConfigError(f"{where}.{key}: {value!r:.60} is not allowed; give an integer of at least 1")
    if not is_ours:
        return
    if fields["model_type"] == "implicit_mamba2":
        width, divisor = fields["expand"] * fields["hidden_size"], fields["head_dim"]
        if width % divisor:
            raise ConfigError(
                f"{where}.head_dim: {divisor} does not divide expand * hidden_size = {width}; choose a divisor"
            )
    else:
        width, divisor = fields["hidden_size"], fields["num_attention_heads"]
        if width % divisor or width // divisor % 2:
            raise ConfigError(
                f"{where}.num_attention_heads: {divisor} does not divide hidden_size {width} into heads of even width; "
                "choose another number"
            )


def _like(old: Any, new: Any, where: str) -> Any:
    """Return `new` as the type of `old` if the conversion loses nothing; None fits any type. Raises: ConfigError."""
    new = as_number(new) if type(old) in (int, float) else new
    if type(old) is int and isinstance(new, int | float) and abs(new) >= _MAX_INTEGER:
        raise ConfigError(f"{where}: {new!r:.60} is not allowed; give an integer below {_MAX_INTEGER}")
    if old is None or new is None or type(old) is type(new):
        return new
    if isinstance(old, float) and type(new) is int:
        return float(new)
    if type(old) is int and isinstance(new, float) and new.is_integer():
        return int(new)
    raise ConfigError(f"{where}: {new!r} has the wrong type; give one like {old!r}")
