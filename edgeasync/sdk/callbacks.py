"""Calls callbacks in a separate thread, so that slow or failing ones do not disturb training."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import msgspec

from edgeasync.errors import ConfigError
from edgeasync.host.at_exit import OwnThread
from edgeasync.sdk.events import HANDLERS, OF_A_HUB, Best, Event, Update

LOG = logging.getLogger("edgeasync.callbacks")

WAITING_MAX = 10_000
"""Maximum number of events queued for slow callbacks; above it, `Update` events are dropped."""

CLOSE_S = 5.0
"""Maximum time in seconds that a run waits for slow callbacks when it ends."""

_NEWEST_BEST = Event(time_s=0.0)
"""Placeholder in the event queue for the newest best model."""

Callback = Callable[[Any], object] | object
"""A function that receives every event, or an object with some of the methods of `HANDLERS`."""


class StopTraining(Exception):  # noqa: N818 - like StopIteration, not an error
    """Raise this in a callback to end the run; its text becomes `Run.reason`.

    In a `Hub` or in `train`, this exception ends the run for all devices. In an `Agent`, it ends
    only that agent.

    >>> from edgeasync.callbacks import StopTraining, VersionEvent
    >>> def stop_early(event):
    ...     if isinstance(event, VersionEvent) and event.version >= 3:
    ...         raise StopTraining("three versions are enough")
    """


class Callbacks:
    """Delivers events to callbacks, in order, in a separate thread.

    `async with` starts the thread. At the end of the block, it waits for slow callbacks.

    `kinds` are the event types that can occur. When a callback ends the run, `on_stop` is called
    with the reason, in the callbacks' thread.
    """

    def __init__(self, callbacks: Sequence[Callback], kinds: Collection[type[Event]] = OF_A_HUB) -> None:
        if not isinstance(callbacks, list | tuple):
            raise ConfigError(f"callbacks is {type(callbacks).__name__}; pass a list of callbacks")
        names = [name for kind, name in HANDLERS.items() if kind in kinds]
        self._callbacks = [_check(callback, names) for callback in callbacks]
        self.on_stop: Callable[[str], None] = lambda _: None
        self._wants_best = any(hasattr(callback, HANDLERS[Best]) for callback in callbacks)
        self._best: Best | None = None
        self._waiting: queue.Queue[Event | None] = queue.Queue()
        self._failed: set[int] = set()
        self._thread = OwnThread("edgeasync-callbacks", self._run)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            LOG.warning(
                "callbacks are %d events behind after %g s; ending without waiting for them",
                self._waiting.qsize(),
                CLOSE_S,
            )

    def tell(self, event: Event) -> None:
        """Queue an event for the callbacks, from any thread, without waiting."""
        if isinstance(event, Best):
            if self._wants_best:
                self._best = event  # replaces an older one in the queue, since each contains a model
                self._waiting.put(_NEWEST_BEST)
        elif self._callbacks and not (isinstance(event, Update) and self._waiting.qsize() >= WAITING_MAX):
            self._waiting.put(event)

    @property
    def here(self) -> bool:
        """Whether the current thread is the callbacks' thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            told = self._take_best() if event is _NEWEST_BEST else event
            if told is not None:
                for number, callback in enumerate(self._callbacks):
                    self._call(number, callback, told)

    def _take_best(self) -> Best | None:
        """Return the newest best model that was not delivered yet.

        The model is copied, because the hub reuses its buffers.
        """
        best, self._best = self._best, None
        if best is None:
            return None
        return msgspec.structs.replace(best, arrays={name: array.copy() for name, array in best.arrays.items()})

    def _call(self, number: int, callback: Any, event: Event) -> None:
        given_all = callback if callable(callback) and not isinstance(event, Best) else None
        handler = getattr(callback, HANDLERS[type(event)], None) or given_all
        if handler is None:
            return
        try:
            handler(event)
        except StopTraining as stop:
            self.on_stop(str(stop) or f"stopped by {_name(callback)}")
        except BaseException:  # including SystemExit, so that the other callbacks are still called
            if number not in self._failed:  # log each callback only once
                self._failed.add(number)
                LOG.exception("callback %s failed on %s; training continues", _name(callback), event)


def _check(callback: Callback, names: Sequence[str]) -> Callback:
    if isinstance(callback, type):
        raise ConfigError(f"the callback {_name(callback)} is a class; pass an instance: {_name(callback)}(...)")
    if callable(callback) or any(hasattr(callback, name) for name in names):
        return callback
    raise ConfigError(
        f"the callback {_name(callback)} has none of these methods: {', '.join(names)}; "
        "add one, or pass a function"
    )


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
