"""The training of a device in virtual time: every local step takes its time, and is taken when that has passed."""

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.device.events import Trained
from edgeasync.core.device.throttle import Pace
from edgeasync.parameters import Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.trainer import ResettableTrainer, ScalableTrainer, Trainer, take_local_steps
from simulation.clock import VirtualClock

Result = TypeVar("Result")


class SimulatedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """What a device trains with beside its trainer, and what it says of that.

    It tells the hub its number of `examples`, whether it is on the `same_host`, and `frozen`, the checksum of its
    arrays that do not travel. Its
    `local` parameters stay with it. It begins with `initial` values of its own, if it has any. `validate` returns
    the loss of its model on data of its own.
    """

    examples: int = 0
    local: LocalParameters | None = None
    initial: Vector | None = None
    validate: Callable[[Vector], float | None] | None = None
    frozen: Frozen | None = None
    same_host: bool = False


class Work:
    """Running local steps: how many are done, and how long they took, up to `since_s`."""

    __slots__ = ("changes", "finish", "local_steps", "overlap", "since_s", "spent_s", "steps_done")

    def __init__(self, local_steps: int, now_s: float, finish: Callable[[int], None], *, overlap: bool) -> None:
        self.local_steps = local_steps
        self.overlap = overlap
        self.finish = finish
        self.changes = 0
        self.steps_done = 0.0
        self.spent_s = 0.0
        self.since_s = now_s


class SimulatedTraining:
    """A device's `DeviceTraining`: a local step takes `step_s`, longer if steps have only a `share` of the time.

    `after` does something on the device in a while, unless it is switched off by then. The speed may change at any
    time, in the middle of a step, too.
    """

    def __init__(
        self,
        trainer: Trainer,
        workload: SimulatedWorkload,
        clock: VirtualClock,
        after: Callable[[float, Callable[[], object]], None],
        *,
        step_s: float,
        share: float,
    ) -> None:
        self.trainer = trainer
        self.local = workload.local or LocalParameters()
        self.work: Work | None = None
        self.step_s = step_s / share
        """How long a local step takes."""
        self._workload = workload
        self._clock = clock
        self._after = after
        self._full_step_s = step_s
        self._first_share = self._share = share
        self._steps_before = 0

    @property
    def steps_total(self) -> int:
        """Local steps since the device was last switched on, those of the running work included."""
        work = self.work
        if work is None:
            return self._steps_before
        done = work.steps_done + (self._clock.now_s - work.since_s) / self.step_s
        return self._steps_before + min(work.local_steps, int(done))

    def cut_power(self) -> None:
        """Forget the running work, and the pace."""
        self.work = None
        self._steps_before = 0
        self._change_pace(self._full_step_s, self._first_share)

    def change_speed(self, step_s: float) -> None:
        """Let a local step take `step_s` from now on; of a running one, what remains of it."""
        self._change_pace(step_s, self._share)

    def _change_pace(self, step_s: float, share: float) -> None:
        work = self.work
        if work is not None:
            self._settle(work)
        self._full_step_s, self._share = step_s, share
        self.step_s = step_s / share if share else math.inf
        if work is not None:
            self._arrange_end(work)

    # -- what the engine asks for -----------------------------------------------------------------------------

    def set_pace(self, pace: Pace) -> None:
        """Draw the steps out; in a pause a running one stands still."""
        self._change_pace(self._full_step_s, pace.share)

    def reset(self) -> None:
        """Let the trainer forget momentum and averages, if it can."""
        if isinstance(self.trainer, ResettableTrainer):
            self.trainer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Let the trainer multiply its learning rate by a factor, if it can."""
        if isinstance(self.trainer, ScalableTrainer):
            self.trainer.scale_learning_rate(factor)

    def submit(self, work: Callable[[], object]) -> None:
        """Do `work` next, in no time."""
        self._after(0.0, work)

    def run(self, work: Callable[[], Result], then: Callable[[Result], None], *, brief: bool = False) -> None:  # noqa: ARG002
        """Do `work` next, in no time, and call `then`."""
        self._after(0.0, lambda: then(work()))

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool, first: bool
    ) -> None:
        """Let the time of the local steps pass, then take them and tell: work that is cut off costs nothing."""
        validate = self._workload.validate

        def finish(steps_done: int) -> None:
            with self.local.in_place(model.parameters):
                if not overlap:
                    if first and self._workload.initial is not None:
                        model.parameters[:] = self._workload.initial
                    self.trainer.begin(model.parameters)
                result = take_local_steps(
                    self.trainer,
                    steps_done,
                    should_stop=lambda: False,
                    on_step=lambda: None,
                    wait=lambda _: None,
                    clock=lambda: 0.0,
                    continues=overlap,
                )
                loss = None if overlap or validate is None else validate(model.parameters)
            self.local.keep()
            assert result is not None
            step_s = work.spent_s / max(1, steps_done)
            then(msgspec.structs.replace(result, step_s=step_s, validation_loss=loss))

        self.work = work = Work(local_steps, self._clock.now_s, finish, overlap=overlap)
        self._arrange_end(work)

    def pause(self) -> None:
        """End overlapped training at once; the time of the unfinished step is lost."""
        work = self.work
        if work is None or not work.overlap:
            return
        self._settle(work)
        self.work = None
        if steps_done := int(work.steps_done):
            work.spent_s *= steps_done / work.steps_done
            self._steps_before += steps_done
            work.finish(steps_done)

    def _settle(self, work: Work) -> None:
        """Account for the time since the work was last looked at."""
        passed_s = self._clock.now_s - work.since_s
        work.since_s = self._clock.now_s
        # A suspended device may be done already, and not know.
        work.steps_done = min(float(work.local_steps), work.steps_done + passed_s / self.step_s)
        if self._share:  # a pause is no time of a step
            work.spent_s += passed_s

    def _arrange_end(self, work: Work) -> None:
        work.changes += 1
        changes = work.changes
        if not self._share:
            return
        remaining_s = (work.local_steps - work.steps_done) * self.step_s

        def end() -> None:
            if self.work is not work or work.changes != changes:
                return
            work.spent_s += remaining_s
            self.work = None
            self._steps_before += work.local_steps
            work.finish(work.local_steps)

        self._after(remaining_s, end)
