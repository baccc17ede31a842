"""Read the YAML files of an experiment as plain dictionaries, check names, and report errors with file and line.

Models, tasks and curricula are in folders of these names beside the experiment file, or else in those of the project.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import yaml

from implicit_llm_contracts.config.fill import EXPONENT_NUMBER, below, fill, fill_keys
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.project_dirs import CONFIG_DIR

# The loader in C is six times as fast; not every build of PyYAML has it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """A loader that refuses a key that occurs twice; YAML itself would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice; remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_NUMBER, list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping. Raises: ConfigError if it is unreadable, no mapping, or has NaN or infinity."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{place}: is not valid YAML: {reason}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values at its top level")
    _check_finite(value, str(path))
    return value


def _check_finite(value: Any, where: str) -> None:
    """Raise ConfigError, which names the key, for the first number below `value` that is not finite."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_finite(item, f"{where}[{key}]" if isinstance(value, list) else below(where, key))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not allowed; give a finite number")


DEFAULT_EXPERIMENT = "paper"
_FOLDERS = (Path("workflow") / "config", CONFIG_DIR)


class ConfigFiles:
    """A reader of the files to which one experiment refers; `source` names the experiment file in messages.

    `known`: values and path of each file already read, by folder/name. With the `known` of an earlier reader of the
    experiment, this reader opens no file.
    """

    def __init__(self, path: Path, source: str = "", known: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.source = source or str(path)
        self.known = dict(known or {})

    def read(self, folder: str, name: str, where: str) -> tuple[Mapping[str, Any], str]:
        """Return values and path of <folder>/<name>.yaml. Raises: ConfigError that starts with `where` if missing."""
        key = f"{folder}/{name}"
        if key not in self.known:
            folders = [self.path.resolve().parent / folder, CONFIG_DIR / folder]
            found = next((path for item in folders if (path := item / f"{name}.yaml").is_file()), None)
            if found is None:
                names = {path.stem for item in folders for path in item.glob("*.yaml")}
                raise ConfigError(f"{where}: there is no {folder}/{name}.yaml; {nearest(name, names)}")
            path = shown_path(found)
            self.known[key] = (read_yaml(path), str(path))
        values, source = self.known[key]
        return values, source


def experiment_path(name_or_path: str) -> Path:
    """Return the file of an experiment, given by its path or by its name in one of the folders of `experiment_names`.

    Raises: ConfigError.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    for named in (folder / f"{name_or_path}.yaml" for folder in _FOLDERS):
        if named.is_file():
            return shown_path(named)
    raise ConfigError(f"{name_or_path}: no such config file; {nearest(path.stem, experiment_names())}")


def experiment_names() -> set[str]:
    """Return the names of the files in workflow/config/, of the working directory and of the project."""
    return {path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")}


def shown_path(path: Path) -> Path:
    """Return the path relative to the working directory, or unchanged if it is not below the working directory."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


T = TypeVar("T")


def fill_entry(cls: type[T], name: str, item: Mapping[str, Any], at: str) -> T:
    """Return an instance of `cls`, which has a field `name`, from an entry and its name. Raises: ConfigError."""
    check_keys(item, [key for key in fill_keys(cls) if key != "name"], at)
    return fill(cls, {"name": name, **item}, at)


def selected(choices: Mapping[str, T], key: str, item: Mapping[str, Any], at: str) -> T:
    """Return the choice that an entry selects with `key`. Raises: ConfigError that names the nearest valid value."""
    if not isinstance(item, Mapping) or key not in item:
        raise ConfigError(f"{at}: the key {key!r} is missing; add it, one of {', '.join(choices)}")
    if item[key] not in choices:
        raise ConfigError(f"{below(at, key)}: there is no {item[key]!r}; {nearest(str(item[key]), choices)}")
    return choices[item[key]]


def check_keys(keys: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise ConfigError, which names the nearest valid key, for the first of `keys` that is not valid."""
    names = list(valid)
    for key in keys:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, names)}")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of the patterns, such as `a5-*`, matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str], names: Iterable[str], problem: str) -> None:
    """Raise ConfigError, which begins with `problem`, for the first pattern that no name matches."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(f"{problem} {pattern!r}; {nearest(pattern, names)}")
