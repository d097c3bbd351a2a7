"""A model that trains in no time, its data, a trainer that moves nothing, and policies that hide nothing."""

import numpy as np

from edgeasync import Dataset, StepResult
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.training.numpy_models import SoftmaxModel

MODEL = SoftmaxModel(inputs=4, classes=2)
X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
DATA = Dataset.of(X, (X[:, 0] > X[:, 1]).astype(np.int64))
ANYWHERE = "tcp://127.0.0.1:*"


def plain(local_steps=5, aggregate=None, **more):
    """Return a policy under which each update is a version of its own, or what `aggregate` makes of them."""
    return Policy(
        aggregate=aggregate or ImmediateAggregator(),
        optimizer=(SGD(),),
        frequency=FixedFrequency(local_steps=local_steps),
        **more,
    )


def in_full(local_steps=5, aggregate=None, **more):
    """Return such a policy under which every update counts in full, however old and long it is."""
    monitor = Monitor(detectors=(), clip=0)
    return plain(local_steps, aggregate, staleness=ConstantStaleness(), monitor=monitor, **more)


class Still:
    """A trainer of a user's own, which moves nothing."""

    spec = MODEL.spec

    def begin(self, parameters):
        pass

    def step(self):
        return StepResult(1.0, 1)
