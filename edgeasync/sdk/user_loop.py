"""Base class of sessions in a user's training loop, with or without a hub."""

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.loop_state import LoopState
from edgeasync.sdk.participants import Participant
from edgeasync.sdk.service import Service
from edgeasync.training.trainer import StepResult

LOG = logging.getLogger("edgeasync.join")

Item = TypeVar("Item")
Found = TypeVar("Found")

ENDING_S = 10.0
"""Maximum time in seconds to wait until the thread behind a loop has ended."""

LOOK_EVERY_S = 1.0
"""Interval in seconds at which a session checks its connection."""

WARN_EVERY_S = 60.0
"""Interval in seconds between warnings while a session trains alone."""

LOST = "the connection is lost"

OVERWRITTEN = "modified by an inplace operation"
"""Part of torch's error message if a parameter changed before the backward pass that needs it."""


class UserLoop(Service):
    """A session in a user's loop: counts steps, and loads new models into the loop's model.

    The session changes the model only during a call of `step`, or during a watched optimizer's
    `step`, and changes all arrays in the same call.
    """

    def __init__(self, participant: Participant, *, keep_optimizer_state: bool | None) -> None:
        super().__init__()
        self._participant = participant
        self._keeps_optimizer_state = keep_optimizer_state
        self._detach: Callable[[], None] = lambda: None
        self._aborted = False
        self._loop_state = LoopState()
        self._noted: tuple[float | None, int] = (None, 0)
        self._score: float | None = None
        self._trouble = LOST
        self._is_begun = False
        self.steps_since_exchange = 0
        """Steps since the newest model was loaded."""
        self.exchanges = 0
        """The number of models that this loop has loaded."""
        self.version: int | None = None
        """The version that this loop trains from; `None` before the first model."""

    @property
    def steps(self) -> int:
        """The number of counted steps: those already exchanged, and those to exchange next.

        With a state folder, steps of earlier starts are included.
        """
        return self._loop_state.steps

    @property
    def finished(self) -> bool:
        """Whether the run has ended: the hub has finished, or the session has ended."""
        lockstep = self._lockstep
        return self._done.done() or (lockstep is not None and lockstep.over)

    @property
    def connected(self) -> bool:
        """Whether the session is connected to its hub or, without a hub, to another device.

        Otherwise the loop trains alone. A warning is logged when the connection is lost, and then
        once a minute.
        """
        return not self.finished and self._is_connected

    @property
    @abstractmethod
    def _is_connected(self) -> bool:
        """Whether there is a connection now."""

    @property
    @abstractmethod
    def _lockstep(self) -> Lockstep | None:
        """The trainer that passes the loop's steps to the worker, once a model is known."""

    # -- the loop --------------------------------------------------------------------------------------------

    def step(self, loss: float | None = None, examples: int = 0) -> None:
        """Count one optimizer step; call this after each step, unless the optimizer is watched.

        `loss` is the step's mean loss, and `examples` its number of examples. If an exchange is
        due, it takes place during this call. Without a connection, the loop continues to train. If
        the session has failed, its error is raised.

        If another backward pass still needs the model's values, as between the steps of a GAN's two
        optimizers, the step is not counted. Its change becomes part of the next counted step.
        """
        if self._participant.pending() is None:
            self._count(loss, examples)

    def _count(self, loss: float | None = None, examples: int = 0) -> None:
        lockstep = self._lockstep
        if self._done.done():
            self._done.result()
            return
        if self._aborted or lockstep is None:
            return
        noted, self._noted = self._noted, (None, 0)
        told = noted[0] if loss is None else float(loss)
        score, self._score = self._score, None
        if lockstep.hand_over(StepResult(told, examples or noted[1]), score):
            self._loop_state.steps += 1
            self.steps_since_exchange += 1
            if not lockstep.await_turn():
                self._done.result(ENDING_S)
                return
        self._take_model(lockstep)

    def note(self, loss: float | None = None, examples: int = 0, *, score: float | None = None) -> None:
        """Set the mean loss and number of examples of the next step, if the optimizer is watched.

        `score` is the model's loss on validation examples. The next update reports the last score;
        the hub's policies `take` and `behind_max` compare devices by their scores.
        """
        self._noted = None if loss is None else float(loss), examples
        self._score = self._score if score is None else float(score)

    def batches(self, loader: Iterable[Item]) -> "LoopBatches[Item]":
        """Return an iterable over a loader's batches; a pass ends early if the run ends.

        With a hub and a state folder, a killed script resumes after the last batch of its last
        update. The order of examples stays the same, and passes that were already finished are
        empty. A pass raises `DataError` if the loader returns no batches.
        """
        return LoopBatches(self, loader)

    def _pass(self, loader: Iterable[Item]) -> Iterator[Item]:
        for batch in self._loop_state.epoch(loader):
            if self.finished:
                return
            yield batch

    @abstractmethod
    def evaluate(self, function: Callable[[], Found]) -> Found:
        """Call `function` with the newest shared values loaded into the model."""

    @abstractmethod
    def abort(self) -> None:
        """Stop exchanging until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Resume exchanges after `abort`."""

    # -- how it runs -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        if self.exchanges and isinstance(error, RuntimeError) and OVERWRITTEN in str(error):
            error.add_note(
                "edgeasync: an exchange may have changed a parameter that this backward pass needs; see 'Several "
                "losses, several optimizers' in docs/train/join.md"
            )
        try:
            if error is None:
                if self._participant.has_unsent:
                    self._count()
                if not self.steps and self._is_begun and not self.finished and not self._aborted:
                    LOG.warning("the session has ended without counting any step of the loop")
                self._send_last_steps()
        except BaseException as failure:
            error = failure
            raise
        finally:
            super().__exit__(kind, error, trace)

    def _stop_with_program(self) -> None:
        """Stop without pushing the last steps, because the loop may have failed in them."""
        if self.steps_since_exchange and not self.finished:
            LOG.warning(
                "the program exits before its session ends: the last %d steps are lost; use `with join(...)`",
                self.steps_since_exchange,
            )
        super()._stop_with_program()

    @contextlib.asynccontextmanager
    async def _warning_when_alone(self) -> AsyncIterator[None]:
        """Warn while the session is not connected."""
        task = asyncio.create_task(self._warn_when_alone())
        try:
            yield
        finally:
            task.cancel()

    async def _warn_when_alone(self) -> None:
        since_s: float | None = None
        warn_at_s = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            if self.connected:
                if since_s is not None:
                    LOG.warning("connected after %.0f s alone", now_s - since_s)
                self._trouble = LOST
            if self.connected or self.finished or self._aborted or not self._is_begun:
                since_s = None
                continue
            if since_s is None:
                since_s, warn_at_s = now_s, now_s
            if now_s >= warn_at_s:
                warn_at_s += WARN_EVERY_S
                LOG.warning("not connected for %.0f s, training alone: %s", now_s - since_s, self._trouble)

    @abstractmethod
    def _send_last_steps(self) -> None:
        """Exchange the steps since the last exchange, and wait a limited time for the answer."""

    def _take_model(self, lockstep: Lockstep) -> bool:
        """Load a new model if there is one; return whether a model was loaded."""
        if not lockstep.take_model():
            return False
        self.steps_since_exchange = 0
        self.exchanges += 1
        if lockstep.take_reset() or not self._keeps_optimizer_state:
            self._participant.reset_optimizer()
        return True


class LoopBatches(Generic[Item]):
    """The batches of a loader; each iteration is one pass over the loader."""

    def __init__(self, session: UserLoop, loader: Iterable[Item]) -> None:
        self._session = session
        self._loader = loader

    def __iter__(self) -> Iterator[Item]:
        return self._session._pass(self._loader)  # noqa: SLF001 - part of the session

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]
