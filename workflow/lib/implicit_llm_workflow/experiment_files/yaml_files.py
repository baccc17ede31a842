"""YAML files as plain dictionaries, with errors that name the file and the line."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from implicit_llm_contracts.runs.errors import ConfigError

# YAML 1.1 (PyYAML, and so Snakemake) reads 1e-3 as text, because it wants a dot and a signed exponent.
_EXPONENT_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")


# Six times faster where PyYAML was built with it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Refuses a key that occurs twice, of which YAML would keep the last."""

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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises: ConfigError when it cannot be read, is no valid YAML or no mapping."""
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
    return plain(value)


def plain(value: Any) -> Any:
    """The same tree in plain dictionaries and lists, numbers such as 1e-3 as numbers."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str) and _EXPONENT_NUMBER.fullmatch(value):
        return float(value)
    return value
