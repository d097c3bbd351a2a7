"""Averages training loops' models: rank 0 runs a hub, and each process joins it."""

import contextlib
import logging
import secrets
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from edgeasync import SGD, Hub, Policy, Run, join
from edgeasync.async_train.adapters import as_address, put_back, settled
from edgeasync.async_train.distributed import find_master
from edgeasync.async_train.learners import Learner
from edgeasync.async_train.running import temporary_run
from edgeasync.async_train.watching import WATCHED, watched
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.policies.frequency import AdaptiveFrequency, FixedFrequency, TimeFrequency
from edgeasync.policies.monitor import Monitor, NotFiniteDetector
from edgeasync.policies.policy import WarmUp

LOG = logging.getLogger("edgeasync.async_train")

PLAIN = Monitor(detectors=(NotFiniteDetector(),), clip=0.0)
"""Plain averaging: updates are not clipped, and learning rates are not reduced."""

JOIN_S = 30.0
"""Time in seconds that a process waits for the hub before it trains alone.

Rank 0 waits equally long for the other processes to join.
"""

LEFT_S = 30.0
"""Time in seconds that rank 0 waits at the end for the other processes to leave."""

TAKE = ("all", "better", "best")

BEHIND_MAX = 2.0
"""Default of `behind_max`: a device starts over if its score exceeds this times the median."""

MOST = 100_000
"""Default maximum number of iterations between two averagings."""


class Exchanging(TypedDict, total=False):
    """Which updates count, and which devices start over; see docs/train/async_train.md."""

    exchange: str
    preempt: bool
    behind_max: float | None


class Averaging(Exchanging, total=False):
    """The address of rank 0, and the schedule of averaging; see docs/train/async_train.md."""

    master: str | None
    checkpoint_dir: str | Path | None
    keys: str | Path | None
    insecure: bool
    own_start: bool
    agent: dict[str, Any]
    topology: str
    peers: str | Path | None

    averaging_frequency: int
    averaging_policy: str
    averaging_interval_s: float
    min_averaging_frequency: int
    max_averaging_frequency: int
    adaptation_metric: str
    warmup_steps: int
    delay: int


class Communication:
    """Trains a loop's model through a hub, together with other processes, from `start` to `stop`.

    - `master`: the hub's address; by default, from MASTER_ADDR and MASTER_PORT.
    - `session`: arguments of `join`.
    - `hub`: arguments of `Hub`, if the hub runs in this process.
    - `world_size`: the number of processes for which the hub waits.
    """

    def __init__(
        self,
        model: Any,
        learner: Learner,
        master: str | None,
        *,
        session: dict[str, Any],
        hub: dict[str, Any] | None,
        world_size: int = 1,
    ) -> None:
        self._model, self._learner, self._world_size = model, learner, world_size
        self._master = as_address(master) if master else None
        self._session_arguments = settled(session)
        self._hub_arguments = None if hub is None else settled(hub)
        self.hub: Hub | None = None
        self.session: Any = None

    def start(self) -> Self:
        """Start the hub if it runs in this process, and join it; do nothing if already started."""
        if self.session is not None:
            return self
        address = self._master or as_address(find_master())
        usual = {"keep_optimizer_state": True, "timeout_s": JOIN_S}
        with contextlib.ExitStack() as begun:  # undoes everything if one part fails
            if self._hub_arguments is not None:
                how = watched(self._model, self._hub_arguments)
                self.hub = begun.enter_context(make_hub(self._learner.hub_model, address, **how))
                address = self.hub.address
            how = usual | self._session_arguments
            session = begun.enter_context(join(address, self._learner.participant, **how))
            if self.hub is not None and not self.hub.status()["version"]:  # a resumed hub does not wait
                self._await_others(self.hub)
            begun.pop_all()
        if self.hub is None:
            WATCHED.begin(self._model)  # rank 0's hub monitors the training
        self.session = session
        return self

    def _await_others(self, hub: Hub) -> None:
        try:
            hub.wait_for(self._world_size, JOIN_S)
        except TimeoutError as error:
            LOG.warning("rank 0 starts without the others: %s", error)

    def stop(self) -> Run | None:
        """Push the last steps, and stop the session.

        If the hub runs in this process, wait until the other processes have left, load the run's
        final values into the model, and return the run.
        """
        if self.session is None:
            return None
        session, self.session = self.session, None
        with contextlib.ExitStack() as ending:
            if self.hub is not None:
                ending.push(self.hub)  # so that the hub ends even if the session fails
            session.__exit__(None, None, None)
            if self.hub is None:
                return None
            with contextlib.suppress(TimeoutError, EdgeAsyncError):  # the hub may have ended already
                self.hub.wait_until_left(LEFT_S)
            self.hub.finish("the loop has ended")
            self.hub.wait()
            run = Run.open(self.hub.path)
            put_back(self._model, run.arrays)
            return run


def through_hub(
    model: Any,
    learner: Learner,
    rank: int,
    world_size: int,
    *,
    master: str | None = None,
    checkpoint_dir: str | Path | None = None,
    keys: str | Path | None = None,
    insecure: bool = False,
    own_start: bool = False,
    agent: dict[str, Any] | None = None,
    **averaging: Any,
) -> Communication:
    """Create the `Communication` that averages a loop's model through a hub."""
    policy = make_policy(world_size, **averaging)
    hub = {"run": checkpoint_dir, "keys": keys, "policy": policy, "insecure": insecure}
    session = {"name": f"rank-{rank}-{secrets.token_hex(3)}", "own_start": own_start, "insecure": insecure}
    return Communication(
        model,
        learner,
        master or ("127.0.0.1:*" if world_size == 1 else None),
        session=session | (agent or {}),
        hub=None if rank else hub,
        world_size=world_size,
    )


def make_hub(model: Any, address: str, *, run: str | Path | None = None, **arguments: Any) -> Hub:
    """Create the hub that averages the loops' models."""
    return Hub(
        model,
        run=run or temporary_run(),
        bind=address,
        loss="mse",  # a placeholder for any model; devices do not compute it
        settings={"hub": {"quiet": False}},
        **arguments,
    )


def make_policy(
    world_size: int,
    *,
    averaging_frequency: int = 100,
    averaging_policy: str = "iterations",
    averaging_interval_s: float = 1.0,
    min_averaging_frequency: int = 1,
    max_averaging_frequency: int = MOST,
    adaptation_metric: Any = "loss_variance",
    warmup_steps: int = 0,
    delay: int = 0,
    **exchange: Unpack[Exchanging],
) -> Policy:
    """Return the policy of rank 0's hub, which averages the models of all processes.

    Raises `ConfigError` for an unknown `averaging_policy`.
    """
    least, most = min_averaging_frequency, max_averaging_frequency
    frequencies: dict[str, Any] = {
        "iterations": lambda: FixedFrequency(local_steps=averaging_frequency),
        "time": lambda: TimeFrequency(seconds=averaging_interval_s, local_steps_min=least, local_steps_max=most),
        "adaptive": lambda: AdaptiveFrequency(
            metric=adaptation_metric,
            period_steps_min=min(max(averaging_frequency, least), most),
            local_steps_min=least,
            local_steps_max=most,
            epochs_max=1e6,
            rest=False,
        ),
    }
    if averaging_policy not in frequencies:
        names = " or ".join(map(repr, frequencies))
        raise ConfigError(f"averaging_policy is {averaging_policy!r}; choose {names}")
    warm_up = (
        WarmUp(updates=warmup_steps * world_size, frequency=FixedFrequency(local_steps=1))
        if warmup_steps
        else None
    )
    frequency = frequencies[averaging_policy]()
    return Policy(
        optimizer=(SGD(),),
        **exchanging(**exchange),
        frequency=frequency,
        delay_steps=delay,
        warm_up=warm_up,
        monitor=PLAIN,
    )


def exchanging(exchange: str = "all", *, preempt: bool = False, behind_max: float | None = None) -> dict[str, Any]:
    """Return the policy settings for `exchange`; raises `ConfigError` if its value is unknown."""
    if exchange not in TAKE:
        raise ConfigError(f"exchange is {exchange!r}; choose {' or '.join(map(repr, TAKE))}")
    if preempt and behind_max is None:
        behind_max = BEHIND_MAX
    return {"take": exchange, "preempt": preempt, "behind_max": behind_max}
