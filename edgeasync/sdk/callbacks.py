"""Hands events to callbacks in a thread of their own: neither a slow one nor an error in one disturbs training."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from edgeasync.errors import ConfigError
from edgeasync.sdk.events import HANDLERS, Event, Update

LOG = logging.getLogger("edgeasync.callbacks")

WAITING_MAX = 10_000
"""Events that may wait for slow callbacks; of more, updates are left out."""

CLOSE_S = 5.0
"""How long the end of a run waits for callbacks that are behind."""

Callback = Callable[[Any], object] | object
"""A callable that is given every event, or an object with some of the methods of `HANDLERS`."""


class Callbacks:
    """Tells callbacks of events, in order. `async with` begins, and at its end waits for those that are behind."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, list | tuple):
            raise ConfigError(f"callbacks is {type(callbacks).__name__}; give a list of them")
        self._callbacks = [_check(callback) for callback in callbacks]
        self._waiting: queue.Queue[Event | None] = queue.Queue()
        self._failed: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="edgeasync-callbacks", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            LOG.warning(
                "callbacks are behind by %d events after %g s; they are left behind",
                self._waiting.qsize(),
                CLOSE_S,
            )

    def tell(self, event: Event) -> None:
        """Hand an event on, from any thread, without waiting."""
        if self._callbacks and not (isinstance(event, Update) and self._waiting.qsize() >= WAITING_MAX):
            self._waiting.put(event)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            for number, callback in enumerate(self._callbacks):
                self._call(number, callback, event)

    def _call(self, number: int, callback: Any, event: Event) -> None:
        handler = getattr(callback, HANDLERS[type(event)], None) or (callback if callable(callback) else None)
        if handler is None:
            return
        try:
            handler(event)
        except BaseException:  # SystemExit, too: the others are still to be told
            if number not in self._failed:  # once, however often it fails
                self._failed.add(number)
                LOG.exception("callback %s failed on %s; training continues", _name(callback), event)


def _check(callback: Callback) -> Callback:
    if callable(callback) or any(hasattr(callback, name) for name in HANDLERS.values()):
        return callback
    raise ConfigError(
        f"the callback {_name(callback)} has none of the methods {', '.join(HANDLERS.values())}: "
        "give it one, or give a function"
    )


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
