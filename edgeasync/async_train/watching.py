"""Which monitors watch a model, so that the hub which trains the model carries their remedies out."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from edgeasync.callbacks import Event
from edgeasync.policies.monitor import Monitor


class Watcher(Protocol):
    """What an `AsyncTrainingMonitor` is to whatever trains its model."""

    policy: Monitor
    """What the hub watches for."""

    def begin(self) -> None:
        """Note that a hub watches from now on, and carries the remedy out."""

    def see(self, event: Event) -> None:
        """Be told what happens at the hub."""

    def stepped(self, optimizer: object) -> None:
        """Be told which optimizer of `optim` has stepped the model."""


class WatchedModels:
    """The watchers of each model, for as long as the model lives."""

    def __init__(self) -> None:
        self._watchers: dict[int, tuple[Callable[[], Any], list[Watcher]]] = {}

    def add(self, model: object, watcher: Watcher) -> Callable[[], Any]:
        """Let a watcher watch a model; return what returns the model, or `None` once it is gone."""
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
        """Tell the watchers of a model that a hub watches from now on; return them."""
        for watcher in (found := self.of(model)):
            watcher.begin()
        return found

    def stepped(self, model: object, optimizer: object) -> None:
        """Tell the watchers of a model which optimizer of `optim` has stepped it."""
        for watcher in self.of(model):
            watcher.stepped(optimizer)

    def _refer(self, model: object) -> Callable[[], Any]:
        number = id(model)
        try:
            return weakref.ref(model, lambda _: self._watchers.pop(number, None))
        except TypeError:  # a path, say, which holds no memory worth freeing
            return lambda: model


WATCHED = WatchedModels()


def watched(model: object, how: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a hub or of `train`, with what the watchers of its model look for and are told."""
    watchers = WATCHED.begin(model)
    if not watchers:
        return how
    detectors = tuple([detector for watcher in watchers for detector in watcher.policy.detectors])
    return how | {
        "policy": msgspec.structs.replace(how["policy"], monitor=Monitor(detectors=detectors, clip=0.0)),
        "callbacks": [*how.get("callbacks", ()), *(watcher.see for watcher in watchers)],
    }
