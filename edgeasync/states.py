"""State machines with a table of allowed transitions. Transitions are checked in production too."""

from collections.abc import Mapping
from typing import TypeVar

from edgeasync.errors import TransitionError

Name = TypeVar("Name", bound=str)

Table = Mapping[Name, tuple[Name, ...]]
"""Maps each state to the states that may follow it. The initial state is first. Staying in a state
is always allowed.
"""


def check_move(table: Table[Name], before: Name, after: Name, what: str) -> None:
    """Raise `TransitionError` unless `after` may follow `before`. `what` names the object.

    >>> check_move({"open": ("closed",), "closed": ("open",)}, "open", "closed", "a door")
    """
    if after != before and after not in table[before]:
        raise TransitionError(f"{what} cannot change from {before!r} to {after!r}; please report this bug")
