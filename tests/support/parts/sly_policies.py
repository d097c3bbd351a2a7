"""Plugins that do something else once `SLY` says so: no trial can know it, but a run and a replay must."""

import math
from typing import ClassVar

import numpy as np

from edgeasync.policies import Evidence, Interval, Plugin, RowCombiner

SLY = ""
"""What they do: nothing odd, `differ`, `nan`, `raise`."""


def odd(value, *, other):
    if SLY == "raise":
        raise ZeroDivisionError("it was to be expected")
    return {"": value, "differ": other, "nan": math.nan}[SLY]


class Weight(Plugin, frozen=True):
    def __call__(self, staleness):
        return odd(0.5, other=0.25)


class Single(Plugin, frozen=True):
    update: ClassVar[str] = "delta"
    answer: ClassVar[str] = "now"

    def flush_at_s(self, buffered, fleet):
        return buffered[0].arrived_s

    def weights(self, buffered, fleet):
        return [odd(1.0, other=0.9)] * len(buffered)


class Mean(RowCombiner, frozen=True):
    def combine(self, rows, out):
        out[:] = rows.mean(axis=0) * np.float32(odd(1.0, other=1.01))


class Pace(Plugin, frozen=True):
    def retune(self, cadence, fleet, devices):
        return cadence

    def interval(self, device, cadence):
        return Interval(odd(4, other=5), "so it is")


class Step(Plugin, frozen=True):
    state_vectors: ClassVar[int] = 1

    def plan(self, conditions):
        return (odd(0.5, other=0.4),)

    def factor(self, scalars):
        return None

    def apply(self, gradient, parameters, state, scalars):
        state[0] += gradient
        gradient *= np.float32(scalars[0])


class Rate(Step, frozen=True):
    """The same scalars, and other arithmetic."""

    def plan(self, conditions):
        return (0.5,)

    def apply(self, gradient, parameters, state, scalars):
        gradient *= np.float32(odd(0.5, other=0.4))


class Alarmed(Plugin, frozen=True):
    scope: ClassVar[str] = "fleet"
    remedy: ClassVar[str] = "alert"
    count_max: ClassVar[int] = 1
    patient: ClassVar[bool] = False

    def cause(self, update, fleet):
        return odd(Evidence("always"), other=None)
