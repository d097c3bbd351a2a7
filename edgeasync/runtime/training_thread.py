"""The thread of a device in which its trainer is made, trains, and leaves room for work between the steps."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from msgspec.structs import replace

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.device.events import Trained
from edgeasync.errors import ModelMismatchError
from edgeasync.host.awaited_step import AwaitedStep
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.host.worker import Worker
from edgeasync.parameters import Vector, first_difference
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.workload import Workload
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.trainer import (
    CoroutineTrainer,
    InterruptibleTrainer,
    ResettableTrainer,
    StepResult,
    StepsEndedError,
    Trainer,
    take_local_steps,
)

DRAWN_OUT_S = 1.0
"""How often a thread that draws a step out shows that it does not hang."""

Validate = Callable[[Vector], float | None]
Result = TypeVar("Result")


class TrainingThread:
    """Trains, and does other work, one after the other in the order of the calls.

    An agent calls the methods on its loop, except `prepare` and `reset`, which it submits as work. All that is
    given to the constructor is called in the thread:

    - `workload` and `local` are the agent's.
    - Every step is drawn out to `step_s_min`, and so that steps take a `share` of the time; 0 is a pause. The
      share is also asked for on the loop.
    - `local_steps` returns a number of steps to take instead of what the hub assigns, `validate` what measures the
      loss of the parameters. Both are asked for again with every assignment.
    - `hand_over` takes what is to be done on the loop, `warn` a sentence, `fail` whatever a piece of work raises.
    """

    def __init__(
        self,
        workload: Workload,
        local: LocalParameters,
        *,
        step_s_min: float,
        share: Callable[[], float],
        local_steps: Callable[[], int | None],
        validate: Callable[[], Validate | None],
        hand_over: Callable[[Callable[[], None]], None],
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.trainer: Trainer | CoroutineTrainer | None = None
        self.steps_total = 0
        """Local steps taken since the start; counted in the thread."""
        self._workload = workload
        self._initial: Vector | None = None
        self._local = local
        self._local_disk = DiskWatch(warn, "a restart loses what the local parameters learn")
        self._step_s_min = step_s_min
        self._share = share
        self._local_steps, self._validate = local_steps, validate
        self._hand_over, self._warn = hand_over, warn
        self._worker = Worker("train", fail)
        self._stopping, self._pausing = threading.Event(), threading.Event()
        self._stands_still = False
        self._may_train = threading.Event()
        self._may_train.set()
        self._awaited = AwaitedStep(self._stopping)
        self._stepped_s = 0.0

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; a trainer's coroutines run on this loop."""
        self._loop = loop
        self._stepped_s = time.monotonic()
        self._worker.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was asked for before."""
        self._worker.submit(work)

    def run(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` after all that was asked for before, then call `then` on the loop."""
        self._worker.submit(lambda: self._hand_over(partial(then, work())))

    def prepare(self, welcome: Welcome) -> Trainer | CoroutineTrainer:
        """Make the trainer, hold it against the hub's description, and return it; runs in this thread."""
        trainer = self.trainer = self._workload.make_trainer(welcome)
        if trainer.spec != welcome.spec:
            difference = first_difference(trainer.spec, welcome.spec)
            raise ModelMismatchError(
                f"the trainer's parameters are not the hub's: {difference}; give both the same model, names and "
                "shapes included"
            )
        make_initial = self._workload.initial
        self._initial = None if make_initial is None else make_initial(welcome.spec)
        self._local.begin(welcome.spec, welcome.settings, self._warn)
        return trainer

    def reset(self) -> None:
        """Let the trainer forget momentum and averages, if it can; runs in this thread."""
        if isinstance(self.trainer, ResettableTrainer):
            self.trainer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Let the trainer multiply its learning rate by a factor, if it can; runs in this thread."""
        if (scale := getattr(self.trainer, "scale_learning_rate", None)) is not None:
            scale(factor)
        elif factor < 1.0:
            self._warn(
                "the hub halves the devices' learning rates, and this trainer cannot: give it a method "
                "scale_learning_rate(factor), or train with an optimizer of edgeasync or of torch"
            )

    def train(
        self,
        model: DeviceModel,
        local_steps: int,
        then: Callable[[Trained], None],
        exhausted: Callable[[], None],
        *,
        overlap: bool,
        first: bool,
    ) -> None:
        """Take local steps, then call `then` on the loop; or `exhausted`, if the trainer has no more.

        With `overlap` they continue until `pause`. The `first` assignment begins with the initial parameters.
        """
        pausing = self._pausing = threading.Event()

        def work() -> None:
            trainer = self.trainer
            if trainer is None:
                return  # it could not be made, and the agent is ending
            steps = local_steps if overlap else local_steps and (self._local_steps() or local_steps)
            measure = None if overlap else self._validate()
            try:
                with self._local.in_place(model.parameters):
                    if not overlap:
                        if first and self._initial is not None:
                            model.parameters[:] = self._initial
                        trainer.begin(model.parameters)
                    result = self._take_steps(trainer, steps, pausing if overlap else None)
                    if result is not None and measure is not None:
                        result = replace(result, validation_loss=measure(model.parameters))
            except concurrent.futures.CancelledError:
                if not self._stopping.is_set():
                    raise
                return
            if result is not None:
                self._local_disk.write(self._local.keep)
                self._hand_over(partial(then, result))
            elif not (self._stopping.is_set() or (overlap and pausing.is_set())):
                self._hand_over(exhausted)

        self._worker.submit(work)

    def _take_steps(
        self, trainer: Trainer | CoroutineTrainer, local_steps: int, pausing: threading.Event | None
    ) -> Trained | None:
        """Take local steps; with `pausing` they continue those before, until it is set."""
        take_step = self._awaited.in_thread(self._loop, trainer.step) or cast("Trainer", trainer).step

        def step() -> StepResult:
            if pausing is not None and pausing.is_set():
                raise StepsEndedError("other work waits for the thread")
            return take_step()

        return take_local_steps(
            trainer,
            local_steps,
            should_stop=self._should_stop,
            on_step=self._count_step,
            step_s_min=self._step_s_min,
            share=lambda: self._share() or 1.0,  # a step that runs as a pause begins is not drawn out
            wait=self._draw_out,
            continues=pausing is not None,
            step=step,
        )

    def _should_stop(self) -> bool:
        """Wait while training stands still, then return whether it has ended; runs here, between two steps."""
        self._may_train.wait()
        return self._stopping.is_set()

    def _count_step(self) -> None:
        self.steps_total += 1
        self._stepped_s = time.monotonic()

    def _draw_out(self, remaining_s: float) -> None:
        """Wait in the thread for the rest of a step, which is no standstill, however long it takes."""
        until_s = time.monotonic() + remaining_s
        while remaining_s > 0.0 and not self._stopping.wait(min(remaining_s, DRAWN_OUT_S)):
            self._stepped_s = time.monotonic()
            remaining_s = until_s - self._stepped_s

    def stalled_s(self) -> float:
        """Return for how long the thread, if it has work, has ended neither that nor a local step.

        0 for one that rests or stands still because it was asked to.
        """
        begun_s = self._worker.begun_s
        if begun_s is None or not self._may_train.is_set():
            return 0.0
        return time.monotonic() - max(begun_s, self._stepped_s)

    def stand_still(self, *, asked: bool) -> None:
        """Stand still between two steps for as long as a person has asked for it."""
        self._stands_still = asked
        self.follow_pace()

    def follow_pace(self) -> None:
        """Take steps unless a person or the pace wants none; an end is not held up."""
        if self._stopping.is_set() or (not self._stands_still and self._share()):
            self._stepped_s = time.monotonic()
            self._may_train.set()
        else:
            self._may_train.clear()

    def pause(self) -> None:
        """End overlapped training after the current step."""
        self._pausing.set()

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._stopping.is_set()

    def end(self) -> None:
        """Abandon the local steps."""
        self._stopping.set()
        self._may_train.set()
        self._awaited.cancel()

    async def close(self, timeout_s: float) -> bool:
        """Interrupt the running step, and return whether the thread has ended in time; call `end` before."""
        if isinstance(self.trainer, InterruptibleTrainer):
            self.trainer.interrupt()
        return await asyncio.to_thread(self._worker.close, timeout_s)
