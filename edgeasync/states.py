"""State machines with a table of allowed transitions, which are checked in production too."""

from collections.abc import Mapping
from typing import TypeVar

from edgeasync.errors import TransitionError

Name = TypeVar("Name", bound=str)

Table = Mapping[Name, tuple[Name, ...]]
"""Every state, the initial one first, with its possible successors. Staying in a state is always
allowed.
"""


def check_move(table: Table[Name], before: Name, after: Name, what: str) -> None:
    """Raise `TransitionError` unless `after` may follow `before`. `what` names the object.

    >>> check_move({"open": ("closed",), "closed": ("open",)}, "open", "closed", "a door")
    """
    if after != before and after not in table[before]:
        raise TransitionError(f"{what} cannot change from {before!r} to {after!r}; please report this bug")
