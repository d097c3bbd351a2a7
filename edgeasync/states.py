"""States that move along a table, which says what may follow what. Every move is checked, in production too."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from edgeasync.errors import TransitionError

Name = TypeVar("Name", bound=str)

Table = Mapping[Name, tuple[Name, ...]]
"""Every state, the first one first, with those that may follow it. A state may always stay as it is."""


def check_move(table: Table[Name], before: Name, after: Name, what: str) -> None:
    """Raise `TransitionError` unless `after` may follow `before`; `what` says whose state it is."""
    if after != before and after not in table[before]:
        raise TransitionError(f"{what} cannot go from {before!r} to {after!r}; please report this defect")


class State(Generic[Name]):
    """An attribute that begins at the table's first state, and moves only along the table.

    >>> class Door:
    ...     state = State({"open": ("closed",), "closed": ("open", "locked"), "locked": ("closed",)})
    >>> door = Door()
    >>> door.state = "closed"
    >>> door.state
    'closed'
    """

    def __init__(self, table: Table[Name]) -> None:
        self.table = table
        self._first = next(iter(table))

    def __set_name__(self, owner: type, name: str) -> None:
        self._what = f"{owner.__name__}.{name}"
        self._key = f"_{name}_state"

    def __get__(self, instance: object, owner: type) -> Name:
        state: Name = instance.__dict__.get(self._key, self._first)
        return state

    def __set__(self, instance: object, state: Name) -> None:
        check_move(self.table, self.__get__(instance, type(instance)), state, self._what)
        instance.__dict__[self._key] = state
