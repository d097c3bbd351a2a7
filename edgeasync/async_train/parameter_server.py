"""`ParameterServer`: stores the model, and applies workers' updates as they arrive."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from edgeasync import SGD, Hub, Policy, Run
from edgeasync.async_train.adapters import as_loss, is_torch, put_back, settled
from edgeasync.async_train.communication import PLAIN, Exchanging, exchanging
from edgeasync.async_train.ignored import say_once
from edgeasync.async_train.model import Model
from edgeasync.async_train.running import Running, temporary_run
from edgeasync.async_train.watching import WATCHED, watched
from edgeasync.callbacks import EndEvent, JoinEvent
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import ImmediateAggregator, ModelAverageAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.staleness import AdaptiveLearningRate, ConstantStaleness

STEPS_MAX = 100_000
"""Number of local steps that the server assigns. Workers reduce it to `update_frequency`."""

MOMENTUM = 0.9
"""Momentum of the policy `momentum_correction`; the learning rate 1 - `MOMENTUM` offsets it."""

HERE, ANYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - used only with keys or insecure=True

RULES: dict[str, Any] = {"async_sgd": ImmediateAggregator(), "model_average": ModelAverageAggregator()}


class ParameterServer(Running):
    """Stores a model, and applies workers' updates as they arrive.

    docs/train/async_train.md describes the arguments. `hub` is the underlying hub. After
    `wait_for_workers` and after `stop`, the user's model contains the trained values. The server
    accepts other machines only with `keys` or `insecure=True`.

    >>> from edgeasync.async_train import ParameterServer, nn
    >>> with ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0) as server:
    ...     server.hub.status()["version"]
    0
    """

    def __init__(
        self,
        model: Any,
        port: int = 5000,
        *,
        update_rule: str = "async_sgd",
        staleness_policy: str = "adaptive_lr",
        staleness_lr_factor: float = 0.9,
        max_staleness: float = 10,
        checkpoint_dir: str | Path | None = None,
        checkpoint_frequency: int = 1000,
        loss_fn: object = None,
        input_shape: Sequence[int] | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        **exchange: Unpack[Exchanging],
    ) -> None:
        self._model, self._started, self._comers = model, False, Comers()
        how: dict[str, Any] = {
            "model": travelling_model(model, loss_fn, input_shape),
            "run": Path(checkpoint_dir or temporary_run())
            .expanduser()
            .absolute(),  # `start` may be called after a chdir
            "bind": f"tcp://{HERE if keys is None and not insecure else ANYWHERE}:{port or '*'}",
            "policy": server_policy(update_rule, staleness_policy, staleness_lr_factor, max_staleness, **exchange),
            "loss": "cross_entropy" if is_torch(model) and input_shape is None else as_loss(loss_fn),
            "keys": None if keys is None else Path(keys).expanduser().absolute(),
            "insecure": insecure,
            "callbacks": [self._comers],
            "settings": {"checkpoint": {"every": f"{checkpoint_frequency} updates"}},
        }
        self._how = settled(how)
        self.hub = Hub(**self._how)

    def start(self) -> Self:
        """Start listening; return at once."""
        if not self._started and WATCHED.of(self._model):
            self.hub = Hub(**watched(self._model, self._how))
        self.hub.start()
        self._started = True
        if "127.0.0.1" in self.hub.address:
            say_once("ParameterServer: only this machine can connect; pass keys or insecure=True to change that")
        return self

    def wait_for_workers(self, num_workers: int = 1, timeout_s: float | None = None) -> None:
        """Wait until `num_workers` workers have joined, and then until all have left.

        After that, the user's model contains the trained values. Raises `TimeoutError` after
        `timeout_s`.
        """
        self.hub.status()  # raises an error if the server is not running
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._comers.wait_for(num_workers, timeout_s)
        try:
            self.hub.wait_until_left(None if until_s is None else max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"workers are still connected after {timeout_s:g} s") from None
        put_back(self._model, self.hub.snapshot())

    async def wait_for_workers_async(self, num_workers: int = 1, timeout_s: float | None = None) -> None:
        """Do the same as `wait_for_workers`, in a thread."""
        await asyncio.to_thread(self.wait_for_workers, num_workers, timeout_s)

    def stop(self) -> None:
        """If started, end training for all workers, and load the trained values into the model."""
        if not self._started:
            return
        self.hub.finish("the parameter server was stopped")
        self.hub.wait()
        put_back(self._model, Run.open(self.hub.path).arrays)


class Comers:
    """Records the workers that have joined a hub, including those that have already left."""

    def __init__(self) -> None:
        self._names, self._ended, self._news = set[str](), False, threading.Condition()

    def wait_for(self, count: int, timeout_s: float | None) -> None:
        """Wait until `count` workers have joined, or the hub has ended; raises `TimeoutError`."""
        with self._news:
            if not self._news.wait_for(lambda: self._ended or len(self._names) >= count, timeout_s):
                raise TimeoutError(f"fewer than {count} workers have joined after {timeout_s:g} s")

    def on_join(self, event: JoinEvent) -> None:
        """Record a worker that has joined."""
        with self._news:
            self._names.add(event.device)
            self._news.notify_all()

    def on_end(self, event: EndEvent) -> None:  # noqa: ARG002
        """Make all calls of `wait_for` return, because the hub has ended."""
        with self._news:
            self._ended = True
            self._news.notify_all()


def travelling_model(model: Any, loss_fn: Any, input_shape: Sequence[int] | None) -> Any:
    """Convert a model for `Hub`; a torch module is exported to ONNX if its input shape is known."""
    if not is_torch(model):
        return (
            model
            if isinstance(model, str | Path) or not hasattr(model, "build")
            else Model(model, input_shape=input_shape)
        )
    import edgeasync.torch as ours  # noqa: PLC0415 - imports torch

    if input_shape is None:
        return ours.model(model, loss_fn)
    return ours.to_onnx(model, np.zeros((2, *input_shape), np.float32))


def server_policy(
    rule: str, staleness: str, factor: float, max_staleness: float, **exchange: Unpack[Exchanging]
) -> Policy:
    """Return the policy of a server; raises `ConfigError` for an unknown name."""
    policies: dict[str, Any] = {
        "adaptive_lr": AdaptiveLearningRate(factor=factor, staleness_max=max_staleness),
        "filter": ConstantStaleness(staleness_max=max_staleness),
        "momentum_correction": ConstantStaleness(staleness_max=max_staleness),
    }
    for name, given, known in (("update_rule", rule, RULES), ("staleness_policy", staleness, policies)):
        if given not in known:
            raise ConfigError(f"{name} is {given!r}; choose {' or '.join(map(repr, known))}")
    corrected = SGD(learning_rate=1.0 - MOMENTUM, momentum=MOMENTUM, correct_for_staleness=True)
    return Policy(
        aggregate=RULES[rule],
        staleness=policies[staleness],
        optimizer=(corrected if staleness == "momentum_correction" else SGD(),),
        frequency=FixedFrequency(local_steps=STEPS_MAX),
        monitor=PLAIN,
        **exchanging(**exchange),
    )
