"""What has to wait for the folds before it, in order: versions, what is sent of them, what is saved, the end."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.arrays.model_executor import ModelEffect, ModelExecutor, Work
from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.hub.effects import (
    Assign,
    Evaluate,
    Fold,
    Keep,
    Publish,
    Restore,
    SaveBest,
    Stop,
)  # fmt: skip
from edgeasync.core.hub.events import Evaluated, HubEvent
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.core.recovery.state import Note, complete

Queued = ModelEffect | Assign | Evaluate | SaveBest | Note | Stop

Result = TypeVar("Result")

INLINE_BYTES_MAX = 2 << 20
"""Models up to this size are folded at once: that takes less time than handing them over and back."""


class FoldQueue:
    """Carries out one after the other; what takes long with a large model is given to the shell's worker.

    `assign` sends an assignment, `handle` gives the core an event, `restored` is told of a rollback.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        codec: CodecSettings,
        shell: HubShell,
        outbox: Outbox,
        *,
        assign: Callable[[Assign], None],
        handle: Callable[[HubEvent], None],
        restored: Callable[[], None],
    ) -> None:
        self.assignments = 0
        """Assignments that wait: each is about to hold a snapshot."""
        self._executor = executor
        self._model = executor.model
        self._publisher = executor.publisher
        self._codec = codec
        self._shell = shell
        self._outbox = outbox
        self._assign = assign
        self._handle = handle
        self._restored = restored
        self._inline = executor.model.spec.nbytes <= INLINE_BYTES_MAX
        self._waiting: deque[Queued] = deque()
        self._busy = False
        self._evaluated: Snapshot | None = None

    def put(self, effect: Queued) -> None:
        """Let an effect wait for its turn; `advance` carries out what can be."""
        if isinstance(effect, SaveBest) and self._evaluated is not None:
            self._shell.save_best(self._evaluated, effect.loss, effect.accuracy)  # it need not wait for a fold
            return
        self.assignments += isinstance(effect, Assign)
        self._waiting.append(effect)

    def advance(self) -> None:
        """Carry out what waits, up to what the worker is busy with."""
        while self._waiting and not self._busy:
            effect = self._waiting.popleft()
            match effect:
                case Fold() | Publish():
                    self._apply(effect)
                case Keep():
                    self._executor.apply(effect)
                case Restore():
                    self._restored()
                    self._executor.apply(effect)
                case Evaluate():
                    self._shell.evaluate(self._model.current, partial(self._on_evaluated, self._model.current))
                case SaveBest():
                    self._shell.save_best(self._model.current, effect.loss, effect.accuracy)
                case Assign():
                    self.assignments -= 1
                    self._assign(effect)
                case Note():
                    # Written once the log has what it covers.
                    self._run(
                        partial(complete, effect, self._model, self._publisher),
                        lambda state: self._outbox.then(partial(self._shell.save, state)),
                    )
                case Stop():
                    self._outbox.end(partial(self._shell.stop, effect.reason))

    def _apply(self, effect: Fold | Publish) -> None:
        """Change the model, and tell the core what it is to know of that."""
        work, finish = self._executor.begin(effect)

        def done(result: Any) -> None:
            if (event := finish(result)) is not None:
                self._handle(event)

        self._run(work if self._inline else partial(self._work_and_encode, effect, work), done)

    def _work_and_encode(self, effect: Fold | Publish, work: Work) -> Any:
        """Do the work, then code what devices are given of a large model, once and not on the loop."""
        result = work()
        if isinstance(effect, Publish):
            self._publisher.offer(None, self._codec.model)
        elif self._codec.delta == "off" and self._codec.model != "identity":
            self._publisher.fits(result[0], self._codec.model)
        return result

    def _run(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do it at once if the model is small; else in the background, and what is behind it waits."""
        if self._inline:
            then(work())
            return
        self._busy = True

        def done(result: Result) -> None:
            self._busy = False
            then(result)
            self.advance()

        self._shell.run_in_background(work, done)

    def _on_evaluated(self, snapshot: Snapshot, result: Evaluated) -> None:
        """Let the core judge an evaluation; the version it was of is the one it may want saved."""
        self._evaluated = snapshot
        self._handle(result)
        self._evaluated = None
