"""Fill a tree of frozen dataclasses from plain mappings, strictly."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError

T = TypeVar("T")

_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
}


def fill(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Make a `cls` (a dataclass) from `mapping`; `where` is the file or key the mapping came from.

    Lists become tuples, integers floats, strings paths where those are wanted; nothing else is converted, and true is
    no integer.
    Raises: ConfigError for an unknown or missing key, a wrong type or value, or a ValueError of `__post_init__`.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {_shown(mapping)}")
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'; {nearest(str(key), known)}")
    for name, field in known.items():
        if name not in mapping and _is_required(field):
            raise ConfigError(f"{where}: the key '{name}' is missing; add it ({_described(get_type_hints(cls)[name])})")
    hints = get_type_hints(cls)
    values = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in mapping.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _is_required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _convert(wanted: Any, value: Any, where: str) -> Any:
    """`value` as the type `wanted`. Raises: ConfigError."""
    origin = get_origin(wanted)
    if wanted is Any:
        return value
    if origin is Literal:
        return _choose(wanted, value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(wanted, value, where)
    if is_dataclass(wanted) and isinstance(wanted, type):
        return value if isinstance(value, wanted) else fill(wanted, value, where)
    if wanted is tuple or origin in (tuple, list) or wanted is list:
        return _convert_sequence(wanted, value, where)
    if wanted is dict or origin in (dict, Mapping):
        return _convert_mapping(wanted, value, where)
    return _convert_scalar(wanted, value, where)


def _choose(wanted: Any, value: Any, where: str) -> Any:
    for choice in get_args(wanted):
        if value == choice and type(value) is type(choice):
            return choice
    raise ConfigError(f"{where}: {_shown(value)} is not one of {', '.join(map(str, get_args(wanted)))}")


def _convert_union(wanted: Any, value: Any, where: str) -> Any:
    members = get_args(wanted)
    if type(value) in members:  # exact first: an integer given to float | int stays one
        return value
    errors = []
    for member in members:
        try:
            return _convert(member, value, where)
        except ConfigError as error:
            errors.append((member, error))
    # The member of the same shape has the useful message: an unknown key inside, a wrong element.
    for member, reason in errors:
        if _has_shape(member, value):
            raise reason
    raise ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}")


def _has_shape(member: Any, value: Any) -> bool:
    if get_origin(member) is Literal:
        return isinstance(value, str)
    if is_dataclass(member) or (get_origin(member) or member) is dict:
        return isinstance(value, Mapping)
    return (get_origin(member) or member) in (tuple, list) and isinstance(value, list | tuple)


def _convert_sequence(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}")
    arguments = get_args(wanted) or (Any, ...)
    kind = get_origin(wanted) or wanted
    if kind is list or arguments[-1] is Ellipsis:
        types_of_items = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        types_of_items = list(arguments)
    else:
        raise ConfigError(f"{where}: expected {len(arguments)} values, found {len(value)}")
    return kind(
        _convert(item_type, item, f"{where}[{i}]")
        for i, (item_type, item) in enumerate(zip(types_of_items, value, strict=True))
    )


def _convert_mapping(wanted: Any, value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {_shown(value)}")
    key_type, item_type = get_args(wanted) or (Any, Any)
    return {_convert(key_type, key, where): _convert(item_type, item, f"{where}.{key}") for key, item in value.items()}


def _convert_scalar(wanted: Any, value: Any, where: str) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    is_right = isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)
    if is_right:
        return value
    raise ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}{_hint(wanted, value)}")


def _hint(wanted: Any, value: Any) -> str:
    if wanted in (int, float) and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return " (YAML reads 1e-3 as text: write 1.0e-3)" if "e" in value.lower() else " (remove the quotes)"
    return ""


def _described(wanted: Any) -> str:
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(member) for member in get_args(wanted))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(wanted)))
    if (origin or wanted) in (tuple, list):
        return "a list"
    if is_dataclass(wanted) or (origin or wanted) is dict:
        return "a mapping"
    return _NAMES.get(wanted, getattr(wanted, "__name__", str(wanted)))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f"the text '{value:.60}'"
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else "null"
        if value is None
        else f"{value!r:.60}"
    )
