"""States that move along a table, which says what may follow what. Every move is checked, in production too."""

from collections.abc import Mapping
from typing import TypeVar

from edgeasync.errors import TransitionError

Name = TypeVar("Name", bound=str)

Table = Mapping[Name, tuple[Name, ...]]
"""Every state, the first one first, with those that may follow it. A state may always stay as it is."""


def check_move(table: Table[Name], before: Name, after: Name, what: str) -> None:
    """Raise `TransitionError` unless `after` may follow `before`; `what` says whose state it is.

    >>> check_move({"open": ("closed",), "closed": ("open",)}, "open", "closed", "a door")
    """
    if after != before and after not in table[before]:
        raise TransitionError(f"{what} cannot go from {before!r} to {after!r}; please report this defect")
