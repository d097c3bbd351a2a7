"""Keeps the last events and effects of a core in memory, for diagnosis."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

EVENTS_KEPT = 256

LINE_LENGTH_MAX = 300

_SECRETS = ("session", "state_id")
"""Fields that prove a device's identity to the hub."""

_ITEMS_SHOWN = 4
_BYTES_SHOWN = 64
_DEPTH_MAX = 5


class Recorder:
    """Stores the last events, each with its time and its effects.

    It stores the objects themselves, and converts them to text only in `lines`. Pass
    `shown(object)` instead of an object that may be large because a peer created it.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, object]] = deque(maxlen=EVENTS_KEPT)
        self._effects: deque[Sequence[object]] = deque(maxlen=EVENTS_KEPT)

    def begin(self, now_s: float, event: object) -> None:
        """Store an event before the core handles it, so that it is kept if the core fails."""
        self._events.append((now_s, event))
        self._effects.append(())

    def end(self, effects: Sequence[object]) -> None:
        """Store the effects of the last event."""
        self._effects[-1] = effects

    def lines(self) -> list[str]:
        """Return one line for each event and for each of its effects, oldest first."""
        found = []
        for (now_s, event), effects in zip(self._events, self._effects, strict=True):
            found.append(f"{now_s:.3f} s {_text(event)}")
            found += [f"    {_text(effect)}" for effect in effects]
        return found


def shown(what: object) -> str:
    """Format an event, effect or message as one short line that contains no secrets."""
    text = _show(what, _DEPTH_MAX)
    return text if len(text) <= LINE_LENGTH_MAX else f"{text[:LINE_LENGTH_MAX]}..."


def _text(kept: object) -> str:
    return kept if isinstance(kept, str) else shown(kept)


def _show(what: object, depth: int) -> str:
    if depth == 0:
        return "..."
    if isinstance(what, msgspec.Struct):
        fields = [
            f"{name}={'...' if name in _SECRETS else _show(getattr(what, name), depth - 1)}"
            for name in what.__struct_fields__
        ]
        return f"{type(what).__name__}({', '.join(fields)})"
    if isinstance(what, str | bytes | bytearray):
        return repr(what) if len(what) <= _BYTES_SHOWN else f"{what[:_BYTES_SHOWN]!r}..."
    if isinstance(what, dict):
        items = [
            f"{_show(key, 1)}: {_show(value, depth - 1)}" for key, value in islice(what.items(), _ITEMS_SHOWN)
        ]
        return f"{{{', '.join(items)}{', ...' if len(what) > _ITEMS_SHOWN else ''}}}"
    if isinstance(what, list | tuple):
        items = [_show(value, depth - 1) for value in what[:_ITEMS_SHOWN]]
        return f"[{', '.join(items)}{', ...' if len(what) > _ITEMS_SHOWN else ''}]"
    return repr(what) if isinstance(what, int | float | None) else type(what).__name__
