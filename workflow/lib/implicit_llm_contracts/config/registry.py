"""Tables of names that users can add to: solver methods, stopping rules, groups, tasks, kinds of evaluation."""

from collections.abc import Mapping
from typing import TypeVar

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest

T = TypeVar("T")


class NameTaken(UserError, ValueError):
    """A user's name is that of a built-in entry."""


class InvalidEntry(UserError, TypeError):
    """A user's entry cannot do what the entries of its table do."""


class UnknownName(UserError, LookupError):
    """No entry has this name."""


class Registry(dict[str, T]):
    """The entry of each name. `what`: what messages call an entry, such as "solver method"."""

    def __init__(self, what: str, builtin: Mapping[str, T]) -> None:
        super().__init__(builtin)
        self._what, self._builtin = what, frozenset(builtin)

    def refuse_builtin(self, name: str) -> None:
        """Raises: NameTaken for a built-in name."""
        if name in self._builtin:
            raise NameTaken(f"{self._what} {name!r} is built in; choose another name")

    def add(self, name: str, entry: T) -> None:
        """Add a user's entry, or replace one. Raises: NameTaken for a built-in name."""
        self.refuse_builtin(name)
        self[name] = entry

    def __missing__(self, name: str) -> T:
        raise UnknownName(f"there is no {self._what} {name!r}; {nearest(str(name), self)}")
