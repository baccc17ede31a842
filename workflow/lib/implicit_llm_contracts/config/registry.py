"""Tables of names that users can add to: solver methods, stopping rules, groups, model families."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest

T = TypeVar("T")


class NameTaken(UserError, ValueError):
    """A user's name is that of a built-in entry."""


class InvalidEntry(UserError, TypeError):
    """A user's entry cannot do what the entries of its table do."""


class UnknownName(UserError, LookupError):
    """No entry has this name."""


class Declared(str):
    """A name in an experiment that one of its plugins declares.

    The driver does not import the plugin, so no table has the name there. `entries`: what the plugin declares under the
    name, by the `what` of the table.
    """

    def __new__(cls, name: str, entries: Mapping[str, Any] | None = None) -> "Declared":
        return super().__new__(cls, name)

    def __init__(self, name: str, entries: Mapping[str, Any] | None = None) -> None:
        self.entries = entries or {}


class Registry(dict[str, T]):
    """The entry of each name. `what`: what messages call an entry, such as "solver method".

    `is_builtin` tells a name that users cannot take: by default those of `builtin`.
    """

    def __init__(self, what: str, builtin: Mapping[str, T], is_builtin: Callable[[str], object] | None = None) -> None:
        super().__init__(builtin)
        self.what, self._is_builtin = what, is_builtin or frozenset(builtin).__contains__

    def knows(self, name: str) -> bool:
        """Whether the table has the name, or a plugin of the experiment that is read declares it."""
        return name in self or (isinstance(name, Declared) and self.what in name.entries)

    def refuse_builtin(self, name: str) -> None:
        """Raises: NameTaken for a built-in name."""
        if self._is_builtin(name):
            raise NameTaken(f"{self.what} {name!r} is built in; choose another name")

    def add(self, name: str, entry: T) -> None:
        """Add a user's entry, or replace one. Raises: NameTaken for a built-in name."""
        self.refuse_builtin(name)
        self[name] = entry

    def __missing__(self, name: str) -> T:
        raise UnknownName(f"there is no {self.what} {name!r}; {nearest(str(name), self)}")
