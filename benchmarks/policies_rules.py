"""The compared rules, each with a name and a grid of settings by label.

A rule uses the best setting of its grid. The first setting was best when the grids were written, so
`--quick` uses it without tuning. Baselines follow their papers, without our monitor.
"""

from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.kinds import AggregatorKind, StalenessKind
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD, Nesterov, TransformKind
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness, PolynomialStaleness

Grid = dict[str, Policy]

DEFAULT = "default"
SYNC_ALL = "synchronous, all"
SYNC_FIRST = "synchronous, first 70 %"
ASYNCHRONOUS = ("FedAsync", "FedBuff", "ASGD", "fixed interval")

IN_TIME = ConstantStaleness(staleness_max=0)
DECAYING = PolynomialStaleness(exponent=0.5)


def rule(
    staleness: StalenessKind, aggregate: AggregatorKind, optimizer: TransformKind, local_steps: int
) -> Policy:
    """Return a baseline with the same local steps for all devices and without a monitor."""
    return Policy(
        staleness=staleness,
        aggregate=aggregate,
        optimizer=(optimizer,),
        frequency=FixedFrequency(local_steps=local_steps),
        monitor=Monitor(detectors=(), clip=0),
    )


def synchronous(share: float, settings: list[tuple[int, float, float]]) -> Grid:
    """Return synchronous rounds with (local steps, learning rate, Nesterov momentum).

    Late updates are rejected.
    """
    return {
        f"H={steps} lr={rate:g} m={momentum:g}": rule(
            IN_TIME,
            SynchronousAggregator(share=share),
            Nesterov(learning_rate=rate, momentum=momentum) if momentum else SGD(learning_rate=rate),
            steps,
        )
        for steps, rate, momentum in settings
    }


def averaged(settings: list[tuple[int, float]]) -> Grid:
    """Return FedAsync with these (local steps, mixing rate)."""
    return {
        f"H={steps} a={rate:g}": rule(DECAYING, ModelAverageAggregator(rate=rate), SGD(), steps)
        for steps, rate in settings
    }


def buffered(settings: list[tuple[int, int, float]]) -> Grid:
    """Return FedBuff with these (updates in a version, local steps, learning rate)."""
    return {
        f"K={count} H={steps} lr={rate:g}": rule(
            DECAYING, BufferedAggregator(count=count), SGD(learning_rate=rate), steps
        )
        for count, steps, rate in settings
    }


def immediate(settings: list[tuple[int, float]]) -> Grid:
    """Return asynchronous SGD with these (local steps, learning rate)."""
    return {
        f"H={steps} lr={rate:g}": rule(DECAYING, ImmediateAggregator(), SGD(learning_rate=rate), steps)
        for steps, rate in settings
    }


RULES: dict[str, Grid] = {
    DEFAULT: {"": Policy()},
    SYNC_ALL: synchronous(
        1.0, [(16, 1.0, 0.9), (8, 1.0, 0.9), (16, 1.0, 0.8), (16, 1.5, 0.8), (32, 1.0, 0.9), (8, 1.5, 0.8)]
    ),
    SYNC_FIRST: synchronous(
        0.7,
        [
            *((2, 2.0, 0.8), (2, 1.5, 0.9), (4, 1.0, 0.9), (4, 1.5, 0.8)),
            *((4, 2.0, 0.8), (6, 1.5, 0.8), (2, 3.0, 0.8), (4, 1.0, 0.8)),
        ],
    ),
    "FedAsync": averaged([(16, 0.6), (8, 0.6), (8, 0.9), (16, 0.9), (32, 0.9), (4, 0.6)]),
    "FedBuff": buffered(
        [
            *((3, 8, 1.0), (3, 16, 1.0), (5, 8, 1.0), (5, 16, 1.0)),
            *((5, 8, 1.5), (10, 8, 1.5), (10, 8, 2.0), (5, 4, 2.0)),
        ]
    ),
    "ASGD": immediate([(1, rate) for rate in (1.5, 1.0, 2.0, 0.75)]),
    "fixed interval": immediate([(8, 0.6), (16, 0.6), (16, 0.4), (4, 0.8), (8, 0.8), (2, 1.2), (4, 1.2)]),
}
"""All rules on the unequal fleet."""

EVEN_RULES: dict[str, Grid] = {
    DEFAULT: RULES[DEFAULT],
    SYNC_ALL: synchronous(
        1.0,
        [
            *((4, 1.0, 0.9), (4, 1.5, 0.8), (8, 1.0, 0.9), (8, 1.0, 0.8)),
            *((2, 2.0, 0.8), (2, 1.0, 0.9), (4, 1.0, 0.8), (16, 1.0, 0.9)),
        ],
    ),
}
"""The rules on the equal fleet."""
