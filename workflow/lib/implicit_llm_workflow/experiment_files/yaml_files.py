"""Read the YAML files of an experiment as plain dictionaries, check names, and report errors with file and line.

Models, tasks and curricula are in folders of these names beside the experiment file, or else in workflow/config/ of the
project.
"""

import math
import os
import re
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


_MAX_DEPTH, _MAX_VALUES = 100, 1_000_000  # more than any experiment has


class _Loader(_SafeLoader):
    """A loader that refuses texts to which YAML gives another meaning than their authors expect.

    In plain YAML, 010 is eight, 1:30 is ninety, and only the last value of a repeated key is read.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the file's tree of nodes; None for an empty file.

        Raises: ConstructorError for a huge or endless tree, which a few aliases can build.
        """
        root = super().get_single_node()
        waiting = [] if root is None else [(root, 1)]
        for _ in range(_MAX_VALUES):
            if not waiting:
                return root
            node, depth = waiting.pop()
            if depth > _MAX_DEPTH:
                raise _refusal(node, f"has more than {_MAX_DEPTH} levels, or an alias of itself; remove some")
            inside = node.value if isinstance(node, yaml.CollectionNode) else ()
            waiting += [(item, depth + 1) for one in inside for item in (one if isinstance(one, tuple) else (one,))]
        raise _refusal(root, f"has more than {_MAX_VALUES:,} values; remove aliases")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and _MISREAD.fullmatch(node.value) and node.tag in _NUMBER_TAGS:
            raise _refusal(node, f"{node.value} would not be read as a decimal number; write that, or quote it as text")
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # an impossible date, an integer of thousands of digits
            raise _refusal(node, str(error)) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal(key_node, "a key is a list or a mapping; give a text")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _refusal(key_node, f"key {key!r} occurs twice; remove one")
            seen.add(key)
        return super().construct_mapping(node, deep)


_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MISREAD = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9]+)+([.][0-9_]*)?)")  # octal, and numbers with the base 60


def _refusal(node: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_NUMBER, list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, whose values must all exist in JSON.

    Raises: ConfigError if the file is unreadable, invalid or no mapping, or for a value such as a date, binary data, a
    set, NaN or infinity.
    """
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
    _check_plain(value, str(path))
    return value


def _check_plain(value: Any, where: str) -> None:
    """Raise ConfigError, which names the key, for the first value below `value` that JSON does not have."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_plain(item, f"{where}[{key}]" if isinstance(value, list) else below(where, key))
    elif not isinstance(value, str | int | float | bool | None):
        raise ConfigError(f"{where}: {value!s:.60} is read as a {type(value).__name__}; quote it if it is a text")
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
        """Return values and path of <folder>/<name>.yaml. Raises: ConfigError; for a missing file, it names `where`."""
        key = f"{folder}/{name}"
        if key not in self.known:
            folders = [self.path.resolve().parent / folder, CONFIG_DIR / folder]
            # Unlike Path.is_file, this also accepts a name that is too long for any file.
            found = next((path for item in folders if os.path.isfile(path := item / f"{name}.yaml")), None)
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
    if os.path.isfile(path):
        return path
    for named in (folder / f"{name_or_path}.yaml" for folder in _FOLDERS):
        if os.path.isfile(named):
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
    if item[key] not in list(choices):  # a list, because the value may not be hashable
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
