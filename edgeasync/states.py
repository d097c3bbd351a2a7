"""State machines defined by a table of valid transitions, which are checked in production too."""

from collections.abc import Mapping
from typing import TypeVar

from edgeasync.errors import TransitionError

Name = TypeVar("Name", bound=str)

Table = Mapping[Name, tuple[Name, ...]]
"""All states with their next states, the initial state first. A state may also stay unchanged."""


def check_move(table: Table[Name], before: Name, after: Name, what: str) -> None:
    """Raise `TransitionError` unless the table allows `before` -> `after`.

    `what` names the state's owner in the message.

    >>> check_move({"open": ("closed",), "closed": ("open",)}, "open", "closed", "a door")
    """
    if after != before and after not in table[before]:
        raise TransitionError(f"{what} cannot go from {before!r} to {after!r}; please report this bug")
