"""Executes the effects that must wait for earlier folds, in order.

One fold may cause many assignments. The queue executes them in slices, and the event loop reads
messages between two slices.
"""

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
    Broadcast,
    EndHub,
    Evaluate,
    Fold,
    Keep,
    Publish,
    Restore,
    WriteBest,
)  # fmt: skip
from edgeasync.core.hub.events import Evaluated, HubEvent, Peer
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.core.recovery.state import Note, complete
from edgeasync.protocol.messages import Message

Queued = ModelEffect | Assign | Broadcast | Evaluate | WriteBest | Note | EndHub

MAY_WAIT = (Assign, Fold, Publish, Keep, Restore, Broadcast, Evaluate, WriteBest, EndHub)
"""The effects that may have to wait for a fold; frequent effects are listed first."""

Result = TypeVar("Result")

INLINE_BYTES_MAX = 2 << 20
"""Models up to this size are folded on the event loop, which is faster than a handover to the
worker.
"""

FOLD_BYTES_MAX = 2 * INLINE_BYTES_MAX
"""If the updates of a fold exceed this total size, the worker folds them even if the model is
small.
"""

SLICE_BYTES = 1 << 20
"""Maximum total size of the assignments in a slice. Each assignment counts at least
`ASSIGNMENT_BYTES_MIN`.
"""

ASSIGNMENT_BYTES_MIN = 1 << 15

BROADCAST_AT_A_TIME = 64
"""Number of connections to which a broadcast is sent in one slice."""


class FoldQueue:
    """Executes effects in order; the shell's worker does long work on large models.

    `send` sends a message, and `assign` an assignment. `prepare` returns a function that must run
    before an assignment, to encode its payload, or `None`. `handle` passes an event to the core.
    `restored` is called when a rollback is executed.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        codec: CodecSettings,
        shell: HubShell,
        outbox: Outbox,
        *,
        send: Callable[[Peer, Message], None],
        assign: Callable[[Assign], None],
        prepare: Callable[[Assign], Callable[[], None] | None],
        handle: Callable[[HubEvent], None],
        restored: Callable[[], None],
    ) -> None:
        self.assignments = 0
        """The number of queued assignments, each of which will use a snapshot."""
        self._executor = executor
        self._model = executor.model
        self._publisher = executor.publisher
        self._codec = codec
        self._shell = shell
        self._outbox = outbox
        self._send = send
        self._assign = assign
        self._prepare = prepare
        self._handle = handle
        self._restored = restored
        self._nbytes = executor.model.spec.nbytes
        self._inline = self._nbytes <= INLINE_BYTES_MAX
        self._waiting: deque[Queued] = deque()
        self._busy = False
        self._evaluated: Snapshot | None = None

    def put(self, effect: Queued) -> None:
        """Queue an effect; it is executed by `advance`."""
        if isinstance(effect, WriteBest) and self._evaluated is not None:
            self._save_best(self._evaluated, effect)  # no need to wait for a fold
            return
        self.assignments += isinstance(effect, Assign)
        self._waiting.append(effect)

    def advance(self) -> None:
        """Execute queued effects until the worker is busy or the slice is full."""
        sent_bytes = 0
        while self._waiting and not self._busy:
            if sent_bytes >= SLICE_BYTES:
                self._pause()
                return
            sent_bytes += self._carry_out(self._waiting.popleft())

    def _carry_out(self, effect: Queued) -> int:
        """Execute an effect; return the number of bytes that it adds to its slice."""
        match effect:
            case Fold() | Publish():
                self._apply(effect)
            case Assign():
                self._begin_assignment(effect)
                return max(self._nbytes, ASSIGNMENT_BYTES_MIN)
            case Broadcast():
                return self._broadcast(effect)
            case Keep():
                self._executor.apply(effect)
            case Restore():
                self._restored()
                self._executor.apply(effect)
            case Evaluate():
                self._shell.evaluate(self._model.current, partial(self._on_evaluated, self._model.current))
            case WriteBest():
                self._save_best(self._model.current, effect)
            case Note():
                # Write the checkpoint once the entries that it covers are durable.
                self._run(
                    partial(complete, effect, self._model, self._publisher),
                    lambda state: self._outbox.then(partial(self._shell.save, state)),
                )
            case EndHub():
                self._outbox.end(partial(self._shell.stop, effect.reason))
        return 0

    def _save_best(self, snapshot: Snapshot, effect: WriteBest) -> None:
        self._outbox.show(partial(self._shell.save_best, snapshot, effect.loss, effect.accuracy))

    def _pause(self) -> None:
        """Let the shell read messages before the next effect is executed."""
        self._busy = True

        def go_on() -> None:
            self._busy = False
            self.advance()

        self._shell.after(0.0, go_on)

    def _broadcast(self, effect: Broadcast) -> int:
        """Send to the first connections, and queue the rest.

        Return the bytes added to the slice.
        """
        first, others = effect.peers[:BROADCAST_AT_A_TIME], effect.peers[BROADCAST_AT_A_TIME:]
        for peer in first:
            self._send(peer, effect.message)
        if others:
            self._waiting.appendleft(Broadcast(others, effect.message))
        return len(first) * (SLICE_BYTES // BROADCAST_AT_A_TIME)

    def _begin_assignment(self, effect: Assign) -> None:
        """Send an assignment; if it requires an encoding, encode first."""
        work = None if self._inline else self._prepare(effect)
        if work is None:
            self._end_assignment(effect)
        else:
            self._run(work, lambda _: self._end_assignment(effect))

    def _end_assignment(self, effect: Assign) -> None:
        self.assignments -= 1
        self._assign(effect)

    def _apply(self, effect: Fold | Publish) -> None:
        """Change the model; if this results in an event, pass it to the core."""
        if self._inline and (isinstance(effect, Publish) or self._nbytes * len(effect.handles) <= FOLD_BYTES_MAX):
            self._end(self._executor.apply(effect))
            return
        work, finish = self._executor.begin(effect)
        self._run_in_background(
            partial(self._work_and_encode, effect, work), lambda result: self._end(finish(result))
        )

    def _end(self, event: HubEvent | None) -> None:
        if event is not None:
            self._handle(event)

    def _work_and_encode(self, effect: Fold | Publish, work: Work) -> Any:
        """Do the work, then encode a large model for all devices once, off the event loop."""
        result = work()
        if isinstance(effect, Publish):
            self._publisher.offer(None, self._codec.model)
        elif self._codec.delta == "off":
            self._publisher.code(result[0], self._codec.model)
        return result

    def _run(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do the work on the event loop if the model is small.

        Otherwise, do it in the background, while later effects wait.
        """
        if self._inline:
            then(work())
        else:
            self._run_in_background(work, then)

    def _run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        self._busy = True

        def done(result: Result) -> None:
            self._busy = False
            then(result)
            self.advance()

        self._shell.run_in_background(work, done)

    def _on_evaluated(self, snapshot: Snapshot, result: Evaluated) -> None:
        """Pass an evaluation to the core.

        If the core asks to save the best version, save the evaluated version.
        """
        self._evaluated = snapshot
        self._handle(result)
        self._evaluated = None
