"""JSON-schema validation whose errors are one line: file, key, what is wrong, what is allowed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.project_dirs import SCHEMA_DIR


def validate(value: Any, schema: str, where: str, *, prefix: str = "", is_partial: bool = False) -> None:
    """Check `value` against workflow/schemas/<schema>.schema.yaml, or for "file#part" one of the definitions in it.

    Args: where names the file, prefix the key in it at which `value` stands; a partial value may lack required keys.
    Raises: ConfigError for the first problem, unknown keys first and missing ones last.
    """
    errors = list(_validator(schema, is_partial).iter_errors(value))
    if not errors:
        return
    order = {"additionalProperties": 0, "required": 2}
    errors.sort(key=lambda error: (order.get(error.validator, 1), [str(part) for part in error.absolute_path]))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    raise ConfigError(f"{where}: {_message(errors[0], prefix)}{more}")


def check_keys(keys: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises: ConfigError that names the nearest valid key for the first of `keys` that is not valid."""
    names = list(valid)
    for key in keys:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, names)}")


@functools.cache
def _validator(schema: str, is_partial: bool) -> Any:
    from jsonschema import Draft202012Validator  # imported late: 0.1 s that `implicit-llm --help` need not pay
    from jsonschema.validators import extend

    from implicit_llm_workflow.experiment_files.yaml_files import read_yaml

    file, _, part = schema.partition("#")
    tree = read_yaml(SCHEMA_DIR / f"{file}.schema.yaml")
    if file == "experiment":
        _add_settings_of_evaluations(tree["$defs"]["evaluation"]["properties"])
        _add_tasks(tree["$defs"]["data_set"])
    elif file == "task":
        tree["properties"]["kind"] = {"enum": list(TASKS)}
    if part:
        tree = {"$ref": f"#/$defs/{part}", "$defs": tree["$defs"]}
    return extend(Draft202012Validator, {"pattern": _check_pattern})(_without_required(tree) if is_partial else tree)


def _add_settings_of_evaluations(properties: dict[str, Any]) -> None:
    """The kinds and their own settings; those that a file writes in another way than a job are in the schema's file."""
    properties["kind"] = {**properties["kind"], "enum": list(EVALUATION_KINDS)}
    for kind in EVALUATION_KINDS.values():
        hints = get_type_hints(kind.config)
        for name, text in kind.settings.items():
            properties.setdefault(name, {"description": text, **_schema_of(hints[name])})


def _add_tasks(data_set: dict[str, Any]) -> None:
    """A data set is of the kind of one of the tasks, and has the definition of that name."""
    data_set["properties"]["kind"] = {"enum": list(TASKS)}
    data_set["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": task}}, "required": ["kind"]},
            "then": {"$ref": f"#/$defs/{task}"},
        }
        for task in TASKS
    ]


def _schema_of(hint: Any) -> dict[str, Any]:
    """The JSON schema of a field's type; its bounds are checked by the dataclass."""
    if get_origin(hint) in (Union, UnionType):
        return _schema_of(next(member for member in get_args(hint) if member is not type(None)))
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "minItems": 1, "uniqueItems": True, "items": _schema_of(get_args(hint)[0])}
    return {"type": {int: "integer", float: "number", str: "string"}[hint]}


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """A `$` is the very end, as JSON Schema means it: Python's also fits before a newline, and names go to a shell."""
    from jsonschema import ValidationError

    if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _without_required(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_required(item)
            for key, item in schema.items()
            if not (key == "required" and isinstance(item, list))
        }
    if isinstance(schema, list):
        return [_without_required(item) for item in schema]
    return schema


def _message(error: Any, prefix: str) -> str:
    error = _most_specific(error)
    path = key_path(error.absolute_path, prefix)
    at = f"{path}: " if path else ""
    value = error.instance
    match error.validator:
        case "additionalProperties":
            valid = error.schema.get("properties", {})
            unknown = next(key for key in value if key not in valid)
            return f"{at}unknown key {unknown!r}; {nearest(unknown, valid)}"
        case "required":
            missing = next(key for key in error.validator_value if key not in value)
            return f"{at}key {missing!r} is missing; add it"
        case "enum":
            hint = (
                nearest(value, error.validator_value)
                if isinstance(value, str)
                else f"valid: {', '.join(map(str, error.validator_value))}"
            )
            return f"{at}{value!r} is not valid; {hint}"
        case "type":
            kind, allowed = _with_article(error.validator_value), _allowed(error.schema)
            return f"{at}{_short(value)} is not {kind}" + ("" if allowed == kind else f"; give {allowed}")
        case _:
            return f"{at}{_short(value)} is not allowed; give {_allowed(error.schema)}"


def _most_specific(error: Any) -> Any:
    """For a choice of forms, the problem inside the form that was meant: the one that gets past the top level."""
    if error.validator != "anyOf":
        return error
    deeper = [item for item in error.context if len(item.relative_path) > 0 or item.validator == "additionalProperties"]
    return _most_specific(deeper[0]) if deeper else error


def key_path(parts: Iterable[str | int], prefix: str = "") -> str:
    """`runs.a5.seeds[0]` for ("runs", "a5", "seeds", 0)."""
    path = prefix
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


_KINDS = {
    "object": "a mapping",
    "array": "a list",
    "integer": "an integer",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "null",
}


def _with_article(kind: str | list[str]) -> str:
    return " or ".join(_KINDS[item] for item in ([kind] if isinstance(kind, str) else kind))


def _allowed(schema: dict[str, Any]) -> str:
    if "x-allowed" in schema:
        return schema["x-allowed"]
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    if schema.get("minItems") or schema.get("minProperties"):
        bounds.append("with at least one entry")
    if schema.get("uniqueItems"):
        bounds.append("without repetition")
    kind = _with_article(schema["type"]) if "type" in schema else "a valid value"
    return " ".join([kind, " and ".join(bounds)]).strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
