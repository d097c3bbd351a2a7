"""A trainer whose updates are known to the bit."""

import numpy as np

from edgeasync import StepResult


def pattern(spec):
    """Return what one assignment adds, exact in float16 even a thousand times over."""
    return ((np.arange(spec.length) % 3 - 1) * 2.0**-10).astype(np.float32)


class Adder:
    """A trainer that adds the pattern, or an amount, in each local step."""

    def __init__(self, spec, amount=None):
        self.spec = spec
        self._pattern = pattern(spec) if amount is None else np.float32(amount)

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += self._pattern
        return StepResult(1.0, 1)
