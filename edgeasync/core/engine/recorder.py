"""The last events and effects of a core, kept in memory for the moment when something goes wrong."""

import re
from collections import deque
from collections.abc import Sequence

EVENTS_KEPT = 256

LINE_LENGTH_MAX = 300

_SECRET = re.compile(r"""\b(session|state_id)=b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


class Recorder:
    """Keeps the last events, each with its time and what the core wanted done.

    A core sees no payload, so this stays small. Sessions and state ids are left out of the lines: who has them can
    pass for that device.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, object]] = deque(maxlen=EVENTS_KEPT)
        self._effects: deque[Sequence[object]] = deque(maxlen=EVENTS_KEPT)

    def begin(self, now_s: float, event: object) -> None:
        """Keep an event that the core is given now; it may be the last one."""
        self._events.append((now_s, event))
        self._effects.append(())

    def end(self, effects: Sequence[object]) -> None:
        """Keep what the core made of the event that was kept last."""
        self._effects[-1] = effects

    def lines(self) -> list[str]:
        """Return a line for each event, the oldest first, and behind it one for each of its effects."""
        found = []
        for (now_s, event), effects in zip(self._events, self._effects, strict=True):
            found.append(f"{now_s:.3f} s {shown(event)}")
            found += [f"    {shown(effect)}" for effect in effects]
        return found


def shown(what: object) -> str:
    """Return an event, effect or message on one line, cut off if it is long, and without secrets."""
    text = _SECRET.sub(r"\1=...", repr(what))
    return text if len(text) <= LINE_LENGTH_MAX else f"{text[:LINE_LENGTH_MAX]}..."
