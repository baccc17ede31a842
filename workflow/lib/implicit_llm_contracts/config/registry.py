"""Define the type of the tables to which users can add names, such as those of solver methods and groups."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest

T = TypeVar("T")


class NameTaken(UserError, ValueError):
    """A user's entry has the name of a built-in entry."""


class InvalidEntry(UserError, TypeError):
    """A user's entry does not work as the entries of its table must."""


class UnknownName(UserError, LookupError):
    """The table has no entry of this name."""


class Declared(str):
    """A name in an experiment that a plugin of this experiment declares.

    The driver does not import the plugin, so the driver's tables lack the name. `entries`: the entries that the plugin
    declares under the name, by the `what` of their table.
    """

    def __new__(cls, name: str, entries: Mapping[str, Any] | None = None) -> "Declared":
        return super().__new__(cls, name)

    def __init__(self, name: str, entries: Mapping[str, Any] | None = None) -> None:
        self.entries = entries or {}


class Registry(dict[str, T]):
    """A table of entries by name; `table[name]` raises UnknownName for an unknown name.

    `what`: the noun for an entry in messages, such as "solver method". `is_builtin`: whether a name is reserved, so
    that users cannot use it; by default the names of `builtin` are.
    """

    def __init__(self, what: str, builtin: Mapping[str, T], is_builtin: Callable[[str], object] | None = None) -> None:
        super().__init__(builtin)
        self.what, self._is_builtin = what, is_builtin or frozenset(builtin).__contains__

    def knows(self, name: str) -> bool:
        """Return whether the table has the name or a plugin of the experiment declares it."""
        return name in self or (isinstance(name, Declared) and self.what in name.entries)

    def refuse_builtin(self, name: str) -> None:
        """Raise NameTaken if the name is built in."""
        if self._is_builtin(name):
            raise NameTaken(f"{self.what} {name!r} is built in; choose another name")

    def add(self, name: str, entry: T) -> None:
        """Add a user's entry, which replaces an earlier one of this name. Raises: NameTaken for a built-in name."""
        self.refuse_builtin(name)
        self[name] = entry

    def __missing__(self, name: str) -> T:
        raise UnknownName(f"there is no {self.what} {name!r}; {nearest(str(name), self)}")
