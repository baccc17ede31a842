"""Lookups by name in experiment files, and settings as plain mappings."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill, fill_keys
from implicit_llm_workflow.experiment_files.yaml_files import plain

T = TypeVar("T")


def fill_entry(cls: type[T], name: str, item: Mapping[str, Any], at: str) -> T:
    """Fill a class that has a `name` from an entry that stands under this name. Raises: ConfigError."""
    check_keys(item, [key for key in fill_keys(cls) if key != "name"], at)
    return fill(cls, {"name": name, **item}, at)


def selected(choices: Mapping[str, T], key: str, item: Mapping[str, Any], at: str) -> T:
    """What an entry selects by the value of `key`. Raises: ConfigError that names the nearest valid value."""
    if not isinstance(item, Mapping) or key not in item:
        raise ConfigError(f"{at}: the key {key!r} is missing; add it, one of {', '.join(choices)}")
    if item[key] not in choices:
        raise ConfigError(f"{at}.{key}: there is no {item[key]!r}; {nearest(str(item[key]), choices)}")
    return choices[item[key]]


def as_config(settings: Any) -> dict[str, Any]:
    """A dataclass of settings as a job is given it: plain mappings and lists."""
    return plain(asdict(settings))


def as_given(settings: Any, given: Iterable[str]) -> dict[str, Any]:
    """The fields that were given, without the defaults of the others, so that a default is in no identity."""
    return {key: plain(getattr(settings, key)) for key in given}


def check_keys(keys: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises: ConfigError that names the nearest valid key for the first of `keys` that is not valid."""
    names = list(valid)
    for key in keys:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, names)}")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether any of the patterns, such as `a5-*`, matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str], names: Iterable[str], problem: str) -> None:
    """Raises: ConfigError that begins with `problem` for the first pattern that no name matches."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(f"{problem} {pattern!r}; {nearest(pattern, names)}")
