"""What has to wait for the folds before it, in order: versions, what is sent of them, what is saved, the end."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from edgeasync.core.arrays.hub_model import Model, Snapshot
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.hub.effects import (
    Assign,
    Evaluate,
    Fold,
    HubEffect,
    Keep,
    Publish,
    Restore,
    Save,
    SaveBest,
    Stop,
)  # fmt: skip
from edgeasync.core.hub.events import Evaluated, Folded, HubEvent
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.core.recovery.state import Note, complete
from edgeasync.protocol.codecs import Source

Queued = Assign | Fold | Publish | Keep | Restore | Evaluate | SaveBest | Note | Stop

Result = TypeVar("Result")

INLINE_BYTES_MAX = 2 << 20
"""Models up to this size are folded at once: that takes less time than handing them over and back."""


def saving_last(effects: list[HubEffect]) -> list[HubEffect]:
    """Return the effects with a `Save` behind all others but a `Stop`.

    It writes down the core as it is after the whole event, so what the event makes of the model comes first.
    """
    if not any(isinstance(effect, Save) for effect in effects):
        return effects
    return sorted(effects, key=lambda effect: isinstance(effect, Save) + 2 * isinstance(effect, Stop))


class FoldQueue:
    """Carries out one after the other; what takes long with a large model is given to the shell's worker.

    `assign` sends an assignment, `take_in` gives the core an event, `restored` is told of a rollback.
    """

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        codec: CodecSettings,
        shell: HubShell,
        outbox: Outbox,
        *,
        assign: Callable[[Assign], None],
        take_in: Callable[[HubEvent], None],
        restored: Callable[[], None],
    ) -> None:
        self.assigning = 0
        """Assignments in line: each is about to hold a snapshot."""
        self._model = model
        self._publisher = publisher
        self._codec = codec
        self._shell = shell
        self._outbox = outbox
        self._assign = assign
        self._take_in = take_in
        self._restored = restored
        self._inline = model.spec.nbytes <= INLINE_BYTES_MAX
        self._waiting: deque[Queued] = deque()
        self._busy = False
        self._evaluated: Snapshot | None = None

    def put(self, effect: Queued) -> None:
        """Stand in line; `advance` does the rest."""
        if isinstance(effect, SaveBest) and self._evaluated is not None:
            self._shell.save_best(self._evaluated, effect.loss, effect.accuracy)  # it need not wait for a fold
            return
        self.assigning += isinstance(effect, Assign)
        self._waiting.append(effect)

    def advance(self) -> None:
        """Carry out what is in line, up to what the worker is busy with."""
        while self._waiting and not self._busy:
            effect = self._waiting.popleft()
            match effect:
                case Fold() | Publish() | Keep() | Restore():
                    self._move(effect)
                case Evaluate():
                    self._shell.evaluate(self._model.current, partial(self._on_evaluated, self._model.current))
                case SaveBest():
                    self._shell.save_best(self._model.current, effect.loss, effect.accuracy)
                case Assign():
                    self.assigning -= 1
                    self._assign(effect)
                case Note():
                    # Written once the log has what it covers.
                    self._do(
                        partial(complete, effect, self._model, self._publisher),
                        lambda state: self._outbox.then(partial(self._shell.save, state)),
                    )
                case Stop():
                    self._outbox.end(partial(self._shell.stop, effect.reason))

    def _move(self, effect: Fold | Publish | Keep | Restore) -> None:
        match effect:
            case Fold():
                updates = [self._model.release(handle) for handle in effect.handles]
                self._do(partial(self._fold, effect, updates), partial(self._folded, effect))
            case Publish():
                self._do(partial(self._publish, effect), lambda _: None)
            case Keep():
                self._model.keep_current()
            case Restore():
                self._restored()
                self._model.advance(self._model.restore(effect.number))

    def _do(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do it at once if the model is small; else in the background, and what is behind it in line waits."""
        if self._inline:
            then(work())
            return
        self._busy = True

        def done(result: Result) -> None:
            self._busy = False
            then(result)
            self.advance()

        self._shell.run_in_background(work, done)

    def _fold(self, fold: Fold, updates: Sequence[Source]) -> tuple[Snapshot, float]:
        result = self._model.fold(fold, updates)
        if not self._inline and self._codec.delta == "off" and self._codec.model != "identity":
            self._publisher.fits(result[0], self._codec.model)  # so that it is coded here, once
        return result

    def _folded(self, fold: Fold, result: tuple[Snapshot, float]) -> None:
        snapshot, norm = result
        self._model.advance(snapshot)
        if fold.measure:
            self._take_in(Folded(fold.number, norm))

    def _publish(self, publish: Publish) -> None:
        self._publisher.publish(whole=publish.anew)
        if not self._inline:
            self._publisher.offer(None, self._codec.model)  # so that it is coded here, once

    def _on_evaluated(self, snapshot: Snapshot, result: Evaluated) -> None:
        """Let the core judge an evaluation; the version it was of is the one it may want saved."""
        self._evaluated = snapshot
        self._take_in(result)
        self._evaluated = None
