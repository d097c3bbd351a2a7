"""The training thread of a device, which creates the trainer, trains, and runs other work."""

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
from edgeasync.core.device.throttle import Pace
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
"""While the thread waits after a step, it records at this interval in seconds that it is not stalled."""

Validate = Callable[[Vector], float | None]
Result = TypeVar("Result")

NO_STEPS = Trained(0, 0, None, None, 0.0)
"""The result if the trainer has no more steps."""


class StepGate:
    """Controls when a thread takes local steps, by a pace and by requests to pause.

    `share` is the fraction of time for local steps; if it is 0, training is paused. The thread
    calls `wait`, `count` and `draw_out`. The agent calls all other methods on its event loop.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.ending = threading.Event()
        """Set when the local steps are to be abandoned."""
        self.steps_total = 0
        self._stands_still = False
        self._is_open = threading.Event()
        self._is_open.set()
        self._stepped_s = 0.0

    def begin(self) -> None:
        """Start measuring the time since a step last ended."""
        self._stepped_s = time.monotonic()

    def wait(self) -> bool:
        """Wait while training is paused; return whether to abandon the local steps."""
        if not self._is_open.is_set():  # `wait` takes a lock, which would cost every step more than this
            self._is_open.wait()
        return self.ending.is_set()

    def count(self) -> None:
        """Count a step that has ended."""
        self.steps_total += 1
        self._stepped_s = time.monotonic()

    def draw_out(self, remaining_s: float) -> None:
        """Wait until a step has lasted long enough. This time does not count as stalled."""
        until_s = time.monotonic() + remaining_s
        while remaining_s > 0.0 and not self.ending.wait(min(remaining_s, DRAWN_OUT_S)):
            self._stepped_s = time.monotonic()
            remaining_s = until_s - self._stepped_s

    def stalled_s(self, begun_s: float | None) -> float:
        """Return the seconds since the last step ended or, if later, since work started at `begun_s`.

        Returns 0 if there is no work, and while training is paused.
        """
        if begun_s is None or not self._is_open.is_set():
            return 0.0
        return time.monotonic() - max(begun_s, self._stepped_s)

    def stand_still(self, *, asked: bool) -> None:
        """If `asked` is true, pause training at a caller's request; otherwise resume it."""
        self._stands_still = asked
        self._follow()

    def set_share(self, share: float) -> None:
        """Change the fraction of time for local steps."""
        self.share = share
        self._follow()

    def end(self) -> None:
        """Abandon the local steps."""
        self.ending.set()
        self._is_open.set()

    def _follow(self) -> None:
        """Open the gate unless a caller or the pace pauses training. After `end`, it remains open."""
        if self.ending.is_set() or (not self._stands_still and self.share):
            self._stepped_s = time.monotonic()
            self._is_open.set()
        else:
            self._is_open.clear()


class TrainingThread:
    """Trains, and runs other work, in the order of the calls. Implements `DeviceTraining`.

    - `workload` and `local` are the agent's workload and local parameters.
    - After each step, the thread waits, so that a step lasts at least `step_s_min` and that steps
      take at most the fraction `share` of the time.
    - The thread calls `hand_over` with actions for the event loop, `warn` with a message, and
      `fail` with an exception that the work raised.
    """

    local_steps: int | None = None
    """Number of local steps per assignment, if it differs from the number that the hub assigns."""

    validate: Validate | None = None
    """A function that computes the loss of given parameters on held-out examples."""

    def __init__(
        self,
        workload: Workload,
        local: LocalParameters,
        *,
        step_s_min: float,
        share: float,
        hand_over: Callable[[Callable[[], None]], None],
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.trainer: Trainer | CoroutineTrainer | None = None
        self.gate = StepGate(share)
        self._workload = workload
        self._initial: Vector | None = None
        self._local = local
        self._local_disk = DiskWatch(warn, "a restart loses the training of the local parameters")
        self._step_s_min = step_s_min
        self._hand_over, self._warn = hand_over, warn
        self._worker = Worker("train", fail)
        self._pausing = threading.Event()
        self._awaited = AwaitedStep(self.gate.ending)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread. If the trainer's `step` is a coroutine, it runs on `loop`."""
        self._loop = loop
        self.gate.begin()
        self._worker.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` after all work that was submitted before."""
        self._worker.submit(work)

    def run(self, work: Callable[[], Result], then: Callable[[Result], None], *, brief: bool = False) -> None:
        """Run `work` after all work that was submitted before, then call `then` on the event loop.

        `brief` work runs at once if the thread is idle, because a handover would take longer.
        """
        if brief and self._worker.is_idle:
            self._hand_over(partial(then, work()))
        else:
            self._worker.submit(lambda: self._hand_over(partial(then, work())))

    def prepare(self, welcome: Welcome) -> Trainer | CoroutineTrainer:
        """Create the trainer, and compare its arrays with the hub's. Runs in the training thread."""
        trainer = self.trainer = self._workload.make_trainer(welcome)
        if trainer.spec != welcome.spec:
            difference = first_difference(trainer.spec, welcome.spec)
            raise ModelMismatchError(
                f"the trainer's parameters differ from the hub's: {difference}; use the same model on both, with "
                "equal names and shapes"
            )
        make_initial = self._workload.initial
        self._initial = None if make_initial is None else make_initial(welcome.spec)
        self._local.begin(welcome.spec, welcome.settings, self._warn)
        return trainer

    def reset(self) -> None:
        """Reset the trainer's momentum and averages, if supported. Runs in the training thread."""
        if isinstance(self.trainer, ResettableTrainer):
            self.trainer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the trainer's learning rate by a factor. Runs in the training thread.

        If the trainer does not support this, warn.
        """
        if (scale := getattr(self.trainer, "scale_learning_rate", None)) is not None:
            scale(factor)
        elif factor < 1.0:
            self._warn(
                "the hub halves the learning rates, but this trainer does not support it; add a method "
                "scale_learning_rate(factor), or use an optimizer of edgeasync or torch"
            )

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool, first: bool
    ) -> None:
        """Take local steps, then call `then` on the event loop.

        If `overlap` is true, the steps may end early when `pause` is called. If `first` is true,
        this is the first assignment, which begins with the device's own initial parameters, if any.
        """
        pausing = self._pausing = threading.Event() if overlap else self._pausing

        def work() -> None:
            trainer = self.trainer
            if trainer is None:
                return  # making it failed, and the agent is ending
            steps = local_steps if overlap else local_steps and (self.local_steps or local_steps)
            measure = None if overlap else self.validate
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
                if not self.gate.ending.is_set():
                    raise
                return
            if result is not None:
                self._local_disk.write(self._local.keep)
                self._hand_over(partial(then, result))
            elif not (self.gate.ending.is_set() or (overlap and pausing.is_set())):
                self._hand_over(partial(then, NO_STEPS))

        self._worker.submit(work)

    def _take_steps(
        self, trainer: Trainer | CoroutineTrainer, local_steps: int, pausing: threading.Event | None
    ) -> Trained | None:
        """Take local steps. If the event `pausing` is passed, take no more steps once it is set."""
        take_step = self._awaited.in_thread(self._loop, trainer.step) or cast("Trainer", trainer).step

        def step() -> StepResult:
            if pausing is not None and pausing.is_set():
                raise StepsEndedError("the training thread has other work")
            return take_step()

        return take_local_steps(
            trainer,
            local_steps,
            should_stop=self.gate.wait,
            on_step=self.gate.count,
            step_s_min=self._step_s_min,
            share=lambda: self.gate.share or 1.0,  # a step that runs as a pause begins is not prolonged
            wait=self.gate.draw_out,
            continues=pausing is not None,
            step=step,
        )

    def stalled_s(self) -> float:
        """Return the seconds since the thread last finished a local step or other work.

        Returns 0 if there is no work, and while training is paused.
        """
        return self.gate.stalled_s(self._worker.begun_s)

    def set_pace(self, pace: Pace) -> None:
        """Take local steps at this pace from now on. The current step is not interrupted."""
        self.gate.set_share(pace.share)

    def pause(self) -> None:
        """End overlapped training after the current step."""
        self._pausing.set()

    def end(self) -> None:
        """Abandon the local steps."""
        self.gate.end()
        self._awaited.cancel()

    async def close(self, timeout_s: float) -> bool:
        """Interrupt the current step; return whether the thread ended in time. Call `end` before."""
        if isinstance(self.trainer, InterruptibleTrainer):
            self.trainer.interrupt()
        return await asyncio.to_thread(self._worker.close, timeout_s)
