"""Registers the monitors of each model, so that the hub that trains the model uses them."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from edgeasync.callbacks import Event
from edgeasync.policies.monitor import Monitor


class Watcher(Protocol):
    """The interface through which the code that trains a model calls an `AsyncTrainingMonitor`."""

    policy: Monitor
    """The detectors for the hub to use."""

    def begin(self) -> None:
        """Record that from now on a hub monitors the training and applies the remedy."""

    def see(self, event: Event) -> None:
        """Process an event of the hub."""

    def stepped(self, optimizer: object) -> None:
        """Record an optimizer of `optim` that has stepped the model."""


class WatchedModels:
    """Stores the watchers of each model until the model is deleted."""

    def __init__(self) -> None:
        self._watchers: dict[int, tuple[Callable[[], Any], list[Watcher]]] = {}

    def add(self, model: object, watcher: Watcher) -> Callable[[], Any]:
        """Register a watcher of a model.

        Return a function that returns the model, or `None` once it is deleted.
        """
        number = id(model)
        if number not in self._watchers:
            self._watchers[number] = self._refer(model), []
        get, watchers = self._watchers[number]
        watchers.append(watcher)
        return get

    def of(self, model: object) -> list[Watcher]:
        """Return the watchers of a model."""
        return list(self._watchers[id(model)][1]) if id(model) in self._watchers else []

    def begin(self, model: object) -> list[Watcher]:
        """Inform a model's watchers that from now on a hub monitors the training; return them."""
        for watcher in (found := self.of(model)):
            watcher.begin()
        return found

    def stepped(self, model: object, optimizer: object) -> None:
        """Inform a model's watchers that an optimizer of `optim` has stepped the model."""
        for watcher in self.of(model):
            watcher.stepped(optimizer)

    def _refer(self, model: object) -> Callable[[], Any]:
        number = id(model)
        try:
            return weakref.ref(model, lambda _: self._watchers.pop(number, None))
        except TypeError:  # not weakly referenceable, such as a path
            return lambda: model


WATCHED = WatchedModels()


def watched(model: object, how: dict[str, Any]) -> dict[str, Any]:
    """Add the detectors and callbacks of a model's watchers to arguments of `Hub` or `train`."""
    watchers = WATCHED.begin(model)
    if not watchers:
        return how
    detectors = tuple([detector for watcher in watchers for detector in watcher.policy.detectors])
    return how | {
        "policy": msgspec.structs.replace(how["policy"], monitor=Monitor(detectors=detectors, clip=0.0)),
        "callbacks": [*how.get("callbacks", ()), *(watcher.see for watcher in watchers)],
    }
