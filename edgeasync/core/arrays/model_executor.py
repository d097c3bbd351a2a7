"""Applies the core's effects to the model, in a live hub and in a replay."""

from collections.abc import Callable
from functools import partial
from typing import Any

from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.hub.effects import Fold, Keep, Publish, Restore
from edgeasync.core.hub.events import Folded
from edgeasync.protocol.codecs import Source

ModelEffect = Fold | Publish | Keep | Restore

Work = Callable[[], Any]
Finish = Callable[[Any], Folded | None]


class ModelExecutor:
    """Applies effects to the model and to the published model, in order."""

    def __init__(self, model: HubModel, publisher: Publisher) -> None:
        self.model = model
        self.publisher = publisher

    def apply(self, effect: ModelEffect) -> Folded | None:
        """Execute an effect; if this results in an event, return it."""
        match effect:
            case Fold():
                return self._end_fold(effect, self.model.fold(effect, self._release(effect)))
            case Publish():
                self.publisher.publish(whole=effect.whole)
            case Keep():
                self.model.keep_current()
            case Restore():
                self.model.advance(self.model.restore(effect.number))
        return None

    def begin(self, effect: Fold | Publish) -> tuple[Work, Finish]:
        """Return the work of an effect, and a function that processes its result.

        The work may run in any thread, the function must run on the hub's thread. Nothing else may
        change the model between the two calls.
        """
        if isinstance(effect, Publish):
            return partial(self.publisher.publish, whole=effect.whole), lambda _: None
        return partial(self.model.fold, effect, self._release(effect)), partial(self._end_fold, effect)

    def _release(self, fold: Fold) -> list[Source]:
        return [self.model.release(handle) for handle in fold.handles]

    def _end_fold(self, fold: Fold, result: tuple[Snapshot, float]) -> Folded | None:
        snapshot, norm = result
        self.model.advance(snapshot)
        return Folded(fold.number, norm) if fold.measure else None
