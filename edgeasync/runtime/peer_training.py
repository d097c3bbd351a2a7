"""The thread of a peer in which its trainer takes local steps, and what a round asks of the model is done."""

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
"""After this number of local steps the mean loss is that of others."""


class Company:
    """Whether others are there for a peer that trains, and whom of those `to_meet` it has not met yet."""

    def __init__(self, to_meet: tuple[str, ...]) -> None:
        self.meets = bool(to_meet)
        """Whether it waits for others at its begin, and not for ever for rounds without them."""
        self.to_meet = set(to_meet)
        self.has_met = False
        """Whether any other was there."""
        self.connected = False
        """Whether any other is there."""

    @property
    def deserted(self) -> bool:
        """Whether all others have gone."""
        return self.has_met and not self.connected

    def note_found(self, name: str) -> None:
        """Note that another is there."""
        self.has_met = self.connected = True
        self.to_meet.discard(name)


class PeerTraining:
    """Takes local steps, up to `steps_max` of all starts, and does jobs on the model between two of them.

    - It takes its first step once all others are met, or after a lease.
    - With `round_steps` it waits, up to a lease, before it takes twice as many steps without a mean.
    - After a step that makes values of the model not finite, the next one begins from the `keeper`'s copy.

    `tell` takes what the core has to hear of, `trained` is called after the last step, both in the thread.
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
        """The mean loss of the last local steps."""
        self.is_trained = False
        """Whether it takes no more steps."""
        self.stepped_s = time.monotonic()
        """When it last ended a step, or a wait for others."""
        self._begun_steps = self._mean_steps = self.steps_total
        self._half_due_steps: int | None = None
        """After how many steps half of `round_steps` are taken since the last round began."""
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
        """Start the thread; a trainer's coroutines run on this loop."""
        self._worker.start()
        self._worker.submit(lambda: self._run(loop))

    def submit(self, job: Callable[[Vector], None]) -> None:
        """Do a job on the model as soon as the running step has ended."""
        self._jobs.put(job)

    def look_again(self) -> None:
        """Let a trainer that waits for others look whether they are there."""
        self._jobs.put(_nothing)

    def note_round(self) -> None:
        """Note that a round has begun."""
        if self._section.round_steps is not None:
            self._half_due_steps = self.steps_total + -(-self._section.round_steps // 2)

    def take_mean(self, parameters: Vector) -> None:
        """Begin from a model that has moved to a mean, as after a hub's answer; called in the thread."""
        self._mean_steps = self.steps_total
        self._keeper.last_finite.note_mean()
        self._trainer.begin(parameters)

    @property
    def diverged(self) -> bool:
        """Whether the last local step has left values that are not finite."""
        return self._keeper.last_finite.is_restored or not np.isfinite(self.parameters).all()

    def end(self) -> None:
        """Abandon the local steps."""
        self._stopping.set()
        self.look_again()
        self._awaited.cancel()
        if isinstance(self._trainer, InterruptibleTrainer):
            self._trainer.interrupt()

    def close(self, timeout_s: float) -> None:
        """Let the thread end after the running step, or abandon that; then the model is a finite copy. Blocks."""
        has_ended = self._worker.close(timeout_s)
        last = self._keeper.last_finite
        # An abandoned step may still write to the model.
        if last.copy is not None and (not has_ended or (self.diverged and last.copy[1] > self._begun_steps)):
            self.parameters, self.steps_total = last.copy
            last.is_restored = False

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take local steps and do jobs between them; after the last step do jobs alone."""
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
        """Take some local steps, and note their mean loss."""
        steps_max = self._section.steps_max
        wanted = TOLD_STEPS if steps_max is None else max(0, min(TOLD_STEPS, steps_max - self.steps_total))
        done = take_local_steps(
            self._trainer,
            wanted,
            should_stop=self._should_stop,
            on_step=self._count_step,
            step_s_min=self._section.step_s_min,
            wait=self._stopping.wait,
            continues=True,  # a score would go nowhere
            step=self._awaited.in_thread(loop, self._trainer.step),
        )
        if done is not None and done.local_steps:
            self.loss = done.loss_mean
        self.is_trained = not wanted or done is None or done.local_steps < wanted

    def _should_stop(self) -> bool:
        """Do the jobs that wait, then return whether training has ended; called between two steps."""
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
        """Do jobs until the model moves to a mean or the others have gone; after a lease wait for the next one."""
        mean_steps = self._mean_steps
        self._do_jobs_while(lambda: self._mean_steps == mean_steps and not self._company.deserted)
        if self._mean_steps == mean_steps:
            self._mean_steps = COUNT_MAX

    def _do_jobs_while(self, waits: Callable[[], bool]) -> None:
        """Do jobs instead of steps for as long as something is waited for, up to a lease."""
        until_s = time.monotonic() + self._section.lease_s
        while waits() and not self._stopping.is_set():
            try:
                self._jobs.get(timeout=max(0.0, until_s - time.monotonic()))(self.parameters)
            except Empty:
                break
        self.stepped_s = time.monotonic()

    def _count_step(self) -> None:
        if isinstance(self._trainer, BufferedTrainer):
            self._trainer.flush()  # any step may be the last one before a job reads the model
        self.steps_total += 1
        self._keeper.last_finite.note_step()
        self.stepped_s = time.monotonic()
        if self._half_due_steps is not None and self.steps_total >= self._half_due_steps:
            self._half_due_steps = None
            self._tell(RoundHalfDue())
        if self._section.round_steps is not None and self.steps_total % self._section.round_steps == 0:
            self._tell(RoundDue())


def _nothing(_: Vector) -> None:
    """Do nothing: this job only wakes a trainer that waits for jobs."""
