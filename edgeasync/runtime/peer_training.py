"""The training thread of a peer, which takes local steps and runs jobs between them."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np

from edgeasync.core.peer.events import LocalEvent, RoundDue, RoundHalfDue, TrainingBegun
from edgeasync.host.awaited_step import AwaitedStep
from edgeasync.host.worker import Worker
from edgeasync.parameters import Vector
from edgeasync.protocol.messages import COUNT_MAX
from edgeasync.runtime.model_keeper import ModelKeeper
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.trainer import (
    BufferedTrainer,
    CoroutineTrainer,
    InterruptibleTrainer,
    ResettableTrainer,
    Trainer,
    take_local_steps,
)

TOLD_STEPS = 100
"""Number of local steps whose mean loss is reported."""


class Company:
    """Records which other peers have been found. `to_meet` contains those not yet found."""

    def __init__(self, to_meet: tuple[str, ...]) -> None:
        self.meets = bool(to_meet)
        """Whether the peer waits for other peers at its start, and ends early if all of them have left."""
        self.to_meet = set(to_meet)
        self.has_met = False
        """Whether any other peer has been live since the start."""
        self.connected = False
        """Whether any other peer is live now."""

    @property
    def deserted(self) -> bool:
        """Whether all other peers have left."""
        return self.has_met and not self.connected

    def note_found(self, name: str) -> None:
        """Record that another peer is live."""
        self.has_met = self.connected = True
        self.to_meet.discard(name)


class PeerTraining:
    """Takes up to `steps_max` local steps, counted over all starts, and runs jobs between them.

    - It takes its first step once all peers in `to_meet` have been found, or after a lease.
    - If `round_steps` is set, it pauses after twice that number of steps without a new mean. The
      pause lasts at most a lease.
    - If a step makes the model non-finite, the next step starts from the copy in `keeper`.

    Jobs read or change the model. The training thread calls `tell` with events for the core, and
    `trained` after the last step.
    """

    def __init__(
        self,
        trainer: Trainer | CoroutineTrainer,
        kept: tuple[Vector, int],
        section: PeerSection,
        keeper: ModelKeeper,
        company: Company,
        *,
        tell: Callable[[LocalEvent], None],
        trained: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.parameters, self.steps_total = kept
        self.loss: float | None = None
        """The mean loss of the latest local steps."""
        self.is_trained = False
        """Whether training has ended, so that no more local steps follow."""
        self.stepped_s = time.monotonic()
        """Monotonic time at which the last step, or the last wait for other peers, ended."""
        self._begun_steps = self._mean_steps = self.steps_total
        self._half_due_steps: int | None = None
        """The value of `steps_total` at which half of `round_steps` will have passed since the last round began.
        """
        self._trainer = trainer
        self._section = section
        self._keeper = keeper
        self._company = company
        self._tell, self._trained = tell, trained
        self._jobs: SimpleQueue[Callable[[Vector], None]] = SimpleQueue()
        self._stopping = threading.Event()
        self._awaited = AwaitedStep(self._stopping)
        self._worker = Worker("train", fail)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread. If the trainer's `step` is a coroutine, it runs on `loop`."""
        self._worker.start()
        self._worker.submit(lambda: self._run(loop))

    def submit(self, job: Callable[[Vector], None]) -> None:
        """Run a job on the model as soon as the current step has ended."""
        self._jobs.put(job)

    def look_again(self) -> None:
        """Wake the thread if it waits for other peers, so that it checks again."""
        self._jobs.put(_nothing)

    def note_round(self) -> None:
        """Record that a round has begun."""
        if self._section.round_steps is not None:
            self._half_due_steps = self.steps_total + -(-self._section.round_steps // 2)

    def take_mean(self, parameters: Vector) -> None:
        """Continue from a model that now includes a round's mean. Called in the training thread."""
        self._mean_steps = self.steps_total
        self._keeper.last_finite.note_mean()
        self._trainer.begin(parameters)

    @property
    def diverged(self) -> bool:
        """Whether the last local step has made the model non-finite."""
        return self._keeper.last_finite.is_restored or not np.isfinite(self.parameters).all()

    def end(self) -> None:
        """Abandon the local steps."""
        self._stopping.set()
        self.look_again()
        self._awaited.cancel()
        if isinstance(self._trainer, InterruptibleTrainer):
            self._trainer.interrupt()

    def close(self, timeout_s: float) -> None:
        """End the thread after the current step. After the timeout, abandon the step.

        If a step is abandoned, the model is restored from a finite copy. Blocks.
        """
        has_ended = self._worker.close(timeout_s)
        last = self._keeper.last_finite
        # An abandoned step may still write to the model.
        if last.copy is not None and (not has_ended or (self.diverged and last.copy[1] > self._begun_steps)):
            self.parameters, self.steps_total = last.copy
            last.is_restored = False

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take local steps, and run jobs between them. After the last step, run only jobs."""
        self._keeper.copy(self.parameters, self.steps_total)
        self._do_jobs_while(lambda: bool(self._company.to_meet))
        self._tell(TrainingBegun())
        self._trainer.begin(self.parameters)
        try:
            while not self._stopping.is_set() and not self.is_trained:
                self._take_steps(loop)
        except concurrent.futures.CancelledError:
            if not self._stopping.is_set():
                raise
            return
        self._trained()
        while not self._stopping.is_set():
            self._jobs.get()(self.parameters)

    def _take_steps(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take up to `TOLD_STEPS` local steps, and store their mean loss."""
        steps_max = self._section.steps_max
        wanted = TOLD_STEPS if steps_max is None else max(0, min(TOLD_STEPS, steps_max - self.steps_total))
        done = take_local_steps(
            self._trainer,
            wanted,
            should_stop=self._should_stop,
            on_step=self._count_step,
            step_s_min=self._section.step_s_min,
            wait=self._stopping.wait,
            continues=True,  # a peer reports no score
            step=self._awaited.in_thread(loop, self._trainer.step),
        )
        if done is not None and done.local_steps:
            self.loss = done.loss_mean
        self.is_trained = not wanted or done is None or done.local_steps < wanted

    def _should_stop(self) -> bool:
        """Run queued jobs, then return whether training has ended. Called between steps."""
        if not self._stopping.is_set():
            self._keeper.copy(self.parameters, self.steps_total)
        with contextlib.suppress(Empty):
            while not self._stopping.is_set():
                self._jobs.get_nowait()(self.parameters)
        round_steps = self._section.round_steps
        if round_steps is not None and self.steps_total >= self._mean_steps + 2 * round_steps:
            self._wait_for_mean()
        if self._stopping.is_set():
            return True
        if self._keeper.restore(self.parameters):
            if isinstance(self._trainer, ResettableTrainer):
                self._trainer.reset()
            self._trainer.begin(self.parameters)
        return False

    def _wait_for_mean(self) -> None:
        """Run jobs until a round's mean arrives or all other peers have left.

        After a lease without a mean, continue training, and wait again only for a later mean.
        """
        mean_steps = self._mean_steps
        self._do_jobs_while(lambda: self._mean_steps == mean_steps and not self._company.deserted)
        if self._mean_steps == mean_steps:
            self._mean_steps = COUNT_MAX

    def _do_jobs_while(self, waits: Callable[[], bool]) -> None:
        """Run jobs instead of local steps while `waits` returns true, for at most a lease."""
        until_s = time.monotonic() + self._section.lease_s
        while waits() and not self._stopping.is_set():
            try:
                self._jobs.get(timeout=max(0.0, until_s - time.monotonic()))(self.parameters)
            except Empty:
                break
        self.stepped_s = time.monotonic()

    def _count_step(self) -> None:
        if isinstance(self._trainer, BufferedTrainer):
            self._trainer.flush()  # a job may read the model after this step
        self.steps_total += 1
        self._keeper.last_finite.note_step()
        self.stepped_s = time.monotonic()
        if self._half_due_steps is not None and self.steps_total >= self._half_due_steps:
            self._half_due_steps = None
            self._tell(RoundHalfDue())
        if self._section.round_steps is not None and self.steps_total % self._section.round_steps == 0:
            self._tell(RoundDue())


def _nothing(_: Vector) -> None:
    """Do nothing. This job only wakes a thread that waits for jobs."""
