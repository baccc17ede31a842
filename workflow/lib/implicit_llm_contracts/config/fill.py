"""Convert settings: `fill` makes a tree of frozen dataclasses from plain mappings, and `as_config` converts it back."""

import functools
import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest

T = TypeVar("T")

# Snakemake's YAML 1.1 parses 1e-3 as text, because a number needs a dot and a signed exponent there.
EXPONENT_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
    tuple: "a list",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class Only:
    """A rule in a type, such as `Annotated[int, Only(is_positive, "a positive integer")]`, which `fill` enforces."""

    accepts: Callable[[Any], object]
    allowed: str


class AsGiven:
    """A base class of settings whose identity has only the given keys, so that it does not repeat the defaults."""

    @property
    def given(self) -> tuple[str, ...]:
        """The keys that `fill` received, or all keys if the settings were made without `fill`."""
        return self.__dict__.get("_given", tuple(fill_keys(type(self))))


MOST = 10**15  # no setting needs a larger integer, so a larger one is a typo

# In `Annotated[...]`, this keeps a field with its default value out of identities, so results from before the field was
# added stay valid.
UNLESS_DEFAULT = object()


def fill(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Return an instance of the dataclass `cls` with the values of `mapping`, which comes from the file or key `where`.

    If the type of a field requires it, a list becomes a tuple, an integer or a text such as 1e-3 becomes a float, and a
    string becomes a path. Nothing else is converted, and true is not an integer. In a union of dataclasses whose first
    field is a Literal, the value of that field selects the class.
    Raises: ConfigError for an unknown or missing key, a wrong type or value, or a ValueError of `__post_init__`.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {_shown(mapping)}")
    known = fill_keys(cls)
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'; {nearest(str(key), known)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    names = {key: known[key].name for key in mapping}
    values = {name: _convert(hints[name], mapping[key], below(where, key)) for key, name in names.items()}
    for key, field in known.items():
        if key not in mapping and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: the key '{key}' is missing; add it ({_described(hints[field.name])})")
    try:
        found = cls(**values)
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        key = path.rpartition(".")[2]
        raise ConfigError(f"{below(where, key)}: {reason}" if key in known else f"{where}: {error}") from error
    if isinstance(found, AsGiven):
        found.__dict__["_given"] = tuple(mapping)
    return found


def as_config(settings: Any) -> Any:
    """Return settings as mappings, lists and plain values, as they are in a job's identity and as `fill` reads them."""
    if is_dataclass(settings):
        keys = fill_keys(type(settings)).items()
        return {key: as_config(getattr(settings, it.name)) for key, it in keys if _is_in_identity(settings, key, it)}
    if isinstance(settings, Mapping):
        return {key: as_config(value) for key, value in settings.items()}
    return [as_config(value) for value in settings] if isinstance(settings, list | tuple) else settings


def _is_in_identity(settings: Any, key: str, field: Field) -> bool:
    if isinstance(settings, AsGiven):
        return key in settings.given
    can_be_left_out = UNLESS_DEFAULT in get_args(_hints(type(settings))[field.name])  # type: ignore[arg-type]
    return not can_be_left_out or getattr(settings, field.name) != field.default


def check_fields(config: Any, where: str) -> None:
    """Check the values of a dataclass that was made without `fill`. Raises: ConfigError."""
    for name, wanted in _hints(type(config)).items():  # type: ignore[arg-type]
        _convert(wanted, getattr(config, name), f"{where}.{name}")


def fill_keys(cls: type) -> dict[str, Field]:
    """Return the fields by their keys; the key "from", which Python reserves, belongs to the field `from_`."""
    return {field.name.rstrip("_"): field for field in fields(cls) if field.init}


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def below(where: str, key: Any) -> str:
    """Return the place of `key` for messages; `where` is the file or the key above it."""
    return f"{where}: {key}" if where.endswith((".yaml", ".json")) else f"{where}.{key}"


def _convert(wanted: Any, value: Any, where: str) -> Any:
    """Return `value` as the type `wanted`. Raises: ConfigError."""
    kind = _kind(wanted)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return value if isinstance(value, kind) else fill(kind, value, where)
    return _CONVERSIONS.get(kind, _convert_scalar)(wanted, value, where)


def _kind(wanted: Any) -> Any:
    """Return the kind of a type: Annotated, Literal, UnionType, tuple, list, dict, or the type itself."""
    kind = get_origin(wanted) or wanted
    return {Union: types.UnionType, Mapping: dict}.get(kind, kind)


def _convert_annotated(wanted: Any, value: Any, where: str) -> Any:
    kind, *rules = get_args(wanted)
    found = _convert(kind, value, where)
    for rule in rules:
        if isinstance(rule, Only) and not rule.accepts(found):
            raise ConfigError(f"{where}: {value!r:.60} is not allowed; give {rule.allowed}")
    return found


def _choose(choices: Sequence[Any], value: Any, where: str) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    raise ConfigError(f"{where}: {_shown(value)} is not one of {', '.join(map(str, choices))}")


def _convert_union(wanted: Any, value: Any, where: str) -> Any:
    members = get_args(wanted)
    value = as_number(value) if float in members else value
    if type(value) in members:  # exact types come first, so an integer for float | int stays an integer
        return _convert_scalar(type(value), value, where)
    classes = [member for member in members if isinstance(member, type) and is_dataclass(member)]
    if isinstance(value, Mapping) and len(classes) > 1:
        key = fields(classes[0])[0].name  # a Literal, whose value selects the class
        choices = {choice: member for member in classes for choice in get_args(_hints(member)[key])}
        if key not in value:
            raise ConfigError(f"{where}: the key '{key}' is missing; add it (one of {', '.join(choices)})")
        return fill(choices[_choose(list(choices), value[key], below(where, key))], value, where)
    reason = None
    for member in members:
        try:
            return _convert(member, value, where)
        except ConfigError as error:
            # The useful error is that of the member with the same shape, because it names the wrong key or element.
            reason = reason or (error if _has_shape(member, value) else None)
    raise reason or ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}")


def _has_shape(member: Any, value: Any) -> bool:
    kind = _kind(member)
    if kind is Annotated:
        return _has_shape(get_args(member)[0], value)
    shapes = {Literal: (str,), tuple: (list, tuple), list: (list, tuple), dict: (Mapping,)}
    return isinstance(value, Mapping if is_dataclass(kind) else shapes.get(kind, ()))


def _convert_sequence(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}")
    kind, types_of_items = _kind(wanted), get_args(wanted) or (Any, ...)
    if kind is list or types_of_items[-1] is Ellipsis:
        types_of_items = types_of_items[:1] * len(value)
    if len(types_of_items) != len(value):
        raise ConfigError(f"{where}: expected {len(types_of_items)} values, found {len(value)}")
    pairs = enumerate(zip(types_of_items, value, strict=True))
    return kind(_convert(item_type, item, f"{where}[{i}]") for i, (item_type, item) in pairs)


def _convert_mapping(wanted: Any, value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {_shown(value)}")
    key_type, item_type = get_args(wanted) or (Any, Any)
    return {_convert(key_type, key, where): _convert(item_type, item, below(where, key)) for key, item in value.items()}


def as_number(value: Any) -> Any:
    """Return the float of a text such as 1e-3; return any other value unchanged, also 1e999, which is infinite."""
    is_number = isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value) and math.isfinite(float(value))
    return float(value) if is_number else value


def _convert_scalar(wanted: Any, value: Any, where: str) -> Any:
    if wanted is float and type(number := as_number(value)) in (int, float):
        return float(number)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    is_right = isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)
    if is_right and type(value) is int and abs(value) > MOST:
        raise ConfigError(f"{where}: {value!r:.60} is not allowed; give an integer of at most {MOST}")
    if is_right:
        return value
    raise ConfigError(f"{where}: expected {_described(wanted)}, found {_shown(value)}")


_CONVERSIONS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Annotated: _convert_annotated,
    Literal: lambda wanted, value, where: _choose(get_args(wanted), value, where),
    types.UnionType: _convert_union,
    tuple: _convert_sequence,
    list: _convert_sequence,
    dict: _convert_mapping,
}


def _described(wanted: Any) -> str:
    kind = _kind(wanted)
    if kind is Annotated:
        of_type, *rules = get_args(wanted)
        return next((rule.allowed for rule in rules if isinstance(rule, Only)), _described(of_type))
    if kind is types.UnionType:
        return " or ".join(dict.fromkeys(map(_described, get_args(wanted))))
    if kind is Literal:
        return "one of " + ", ".join(map(str, get_args(wanted)))
    return "a mapping" if is_dataclass(kind) else _NAMES.get(kind, getattr(wanted, "__name__", str(wanted)))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return f"the text {value!r:.60}" if isinstance(value, str) else f"{json.dumps(value, default=repr):.60}"
