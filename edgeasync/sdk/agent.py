"""`Agent`: a training device in a Python program."""

import asyncio
import concurrent.futures
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import msgspec
import numpy.typing as npt

from edgeasync.config import convert, whole_path
from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.durable.identity import default_device_id
from edgeasync.errors import ConfigError, HubUnreachableError
from edgeasync.host.sensing import make_sense
from edgeasync.losses import check_loss
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import Vector
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import Device, find_device
from edgeasync.sdk import events
from edgeasync.sdk.agent_worker import AgentWorker
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.keywords import AgentKeywords, LocalKeywords, show_keywords
from edgeasync.sdk.models import as_dataset, check_training, local_training, maker_of
from edgeasync.sdk.plan import as_path
from edgeasync.sdk.service import Service
from edgeasync.sdk.shares import Share, check_apart, count_workers, split
from edgeasync.sdk.trainer_factory import OwnTraining
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import CoroutineTrainer, Trainer

LOG = logging.getLogger("edgeasync.agent")


class Agent(Service):
    """A device that trains for a hub, and waits for the hub as long as needed.

    - `hub`: the hub's address, or several addresses. An enrolled device has stored its hub's
      address, so `hub` may be omitted.
    - `data`: a `Dataset`, a tuple `(x, y)` or a file path. The hub decides which model the device
      trains on these data.
    - `model`: a model of `edgeasync.torch`, `edgeasync.jax` or `edgeasync.sklearn`, or an object
      with `parameters` and `gradient`. The device then trains this model. Its arrays must have the
      same names and shapes as the hub's, in any order.
    - `trainer`: your own trainer, used instead of `data`. If its `step` is an `async def`, `step` is
      awaited on the agent's event loop. Alternatively, pass `data`, and set `trainer` to the name
      of a factory, `"package.module:factory"`, as for the command `edgeasync agent`.
    - `initial`: the parameters that this device starts from, by array name or as one flat vector.
      The device's first update then contains the difference between these parameters and the hub's
      model. By default, the device starts from the hub's model.
    - `validation`: data, a function of the named arrays that returns a loss, or a fraction of this
      device's data to hold out, such as 0.1. Each update then reports this device's validation loss
      after the update's local steps. The hub's policies `take` and `behind_max` compare devices by
      this loss.
    - `workers`: the number of devices in this agent, each with its own connection. They are named
      `name/0`, `name/1` and so on. The data are split evenly at random. To assign data or trainers
      to the workers yourself, pass a list with one entry per worker as `data` or `trainer`.
    - `name`: this device's name, by default the machine's name. Without `state`, six random digits
      are appended to the machine's name at every start.
    - `state`: a folder that stores the device's identity. Without it, the agent is a new device at
      every start.
    - `enrol`: a token from `edgeasync keys enrol`; requires a `state` folder. Without keys, the
      agent connects to other machines only if `insecure` is set.
    - `optimizer`, `batch_size`, `metrics`, `keep_optimizer_state`: settings of this device that
      override the hub's settings.
    - `loss`: the loss that the hub's training graph must have; the agent rejects a graph with
      another loss.
    - `throttle`: a dict with keys of the settings table `[throttle]`. The agent then pauses
      training while this device is too hot, by default at 80 C or more. Without `throttle`, the
      agent reads no sensors.
    - `epochs`: passes over this device's data between two exchanges, instead of the hub's number of
      local steps.
    - `passes`: the number of passes over this device's data after which the agent ends. Each pass
      uses every example once. With a `state` folder and `spool="full"`, passes are counted across
      restarts. A killed agent then continues its interrupted pass.
    - `seed`: the seed for shuffling the examples.
    - `callbacks`: functions, or objects with methods such as `on_exchange`; see
      `edgeasync.callbacks`.
    - `timeout_s`: how long to wait for a hub to accept this device before raising
      `HubUnreachableError` with the reason. By default, and after joining, the agent waits as long
      as needed.
    - `on_report`: a function that is called with each report on the agent's event loop. A report
      has the attributes `event` and `detail`.
    - Other keyword arguments are keys of `[agent]` and `[limits]` in a settings file, such as
      `threads` or `local_steps_max` (docs/reference/settings/index.md). With several workers, a
      limit applies to each worker separately.

    `with` and `start` do not wait for the hub; `wait_until_joined` does.

    >>> import tempfile
    >>> import numpy as np
    >>> from edgeasync import Agent, Hub, Stop
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> model, until = SoftmaxModel(inputs=4, classes=2), Stop(updates=20)
    >>> with Hub(model, run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*", until=until) as hub:
    ...     with Agent(hub.address, (np.eye(4), [0, 1, 0, 1])) as agent:
    ...         agent.wait()
    'the hub has finished training'
    """

    @show_keywords
    def __init__(
        self,
        hub: str | Sequence[str] = (),
        data: object = None,
        *,
        model: object = None,
        trainer: Trainer | CoroutineTrainer | list[Any] | str | None = None,
        initial: Mapping[str, npt.ArrayLike] | Vector | None = None,
        workers: int | None = None,
        name: str | None = None,
        validation: object = None,
        epochs: float | None = None,
        passes: int | None = None,
        throttle: Mapping[str, object] | None = None,
        callbacks: Sequence[Callback] = (),
        timeout_s: float | None = None,
        on_report: Callable[[DeviceReport], None] | None = None,
        **keys: Unpack[AgentKeywords],
    ) -> None:
        super().__init__()
        own, keys_of_file = _sorted(keys)
        if isinstance(trainer, str):
            keys_of_file, trainer = keys_of_file | {"trainer": trainer}, None
        if (data is None) == (trainer is None):
            raise ConfigError(
                "Agent needs training data or a trainer: pass exactly one of data and trainer, or pass both if "
                "trainer is the name of a factory"
            )
        if model is not None and (trainer is not None or "trainer" in keys_of_file):
            raise ConfigError("model and trainer exclude each other: pass model and data, or a trainer")
        self._settings = _settings_of(keys_of_file | {"hub": hub or None, "device_id": name}, throttle)
        self._throttles = throttle is not None
        self._workers_count = _count(workers, trainer if data is None else data, trained=trainer is not None)
        if self._workers_count != 1 and "/" in (name or ""):
            raise ConfigError(f"name is {name!r}; remove the '/': edgeasync adds '/' and a number for each worker")
        _check_passes(epochs, passes, self._settings, trained=trainer is not None)
        self._data = whole_path(data)
        self._given = trainer
        loss = own.pop("loss", None)
        self._own: dict[str, Any] = own
        training = self._with_own(LocalTraining())
        micro_batch_size = self._settings.agent.micro_batch_size
        check_training(model, msgspec.structs.replace(training, micro_batch_size=micro_batch_size))
        self._training = OwnTraining(
            model=whole_path(model),
            initial=None if initial is None else maker_of(initial),
            local=self._with_own,
            loss=None if loss is None else check_loss(loss, "Agent"),
            validation=whole_path(validation),
            epochs=epochs,
            passes=passes,
        )
        self._callbacks = Callbacks(callbacks, events.OF_AN_AGENT)
        self._on_report = on_report
        self._workers: list[AgentWorker] = []
        self._let_in: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._reason = ""
        self._timeout_s = timeout_s
        self._trouble = ""

    @property
    def updates_answered(self) -> int:
        """The number of updates that the hub has answered."""
        return sum(worker.exchanges for worker in self._workers)

    def wait_until_joined(self, timeout_s: float | None = None) -> None:
        """Wait until all workers have joined the hub.

        Raises `TimeoutError`, or the agent's error if it fails first.
        """
        self._check_may_wait("wait_until_joined", "write `await asyncio.to_thread({0}.wait_until_joined)`")
        either: list[concurrent.futures.Future[Any]] = [self._let_in, self._done]
        found, _ = concurrent.futures.wait(either, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        if not found:
            raise TimeoutError(f"no hub accepted this device within {timeout_s:g} s; see the agent's log")
        if not self._let_in.done():
            self._done.result()

    def pause(self, *, training: bool = False) -> None:
        """Leave the hub; neither send nor receive messages until `resume`.

        If `training` is true, local steps continue from the last model and become part of a later
        update. Otherwise training stops.
        """
        self._call(lambda: self._each(lambda agent: agent.request_pause(training=training)))

    def resume(self) -> None:
        """Reconnect to the hub if the agent is paused; otherwise do nothing."""
        self._call(lambda: self._each(lambda agent: agent.request_resume()))

    def evaluate(self, data: object) -> events.Evaluation:
        """Evaluate the newest model received from the hub, in the calling thread.

        `data` has the same forms as for `Agent`, or is a function that takes the named arrays. The
        function returns a loss, or a loss and an accuracy. A training graph is evaluated in
        training mode, with batch statistics and dropout. The result is also passed to the
        callbacks' `on_evaluation`. After the agent has ended, it evaluates the last model that it
        received.

        Raises `EdgeAsyncError` before the agent has received a model, and `DataError` for unusable
        data.
        """
        self._check_may_wait("evaluate", "write `await asyncio.to_thread({0}.evaluate, data)`")
        if self._done.done() and self._workers:
            return self._newest().evaluate(data)
        return self._call(self._newest).evaluate(data)

    def _newest(self) -> AgentWorker:
        return max(self._workers, key=lambda worker: worker.version)

    # -- how it runs -----------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        began_s = time.monotonic()
        network = None if self._workers_count == 1 else ZmqNetwork()
        async with self._callbacks as told:
            told.on_stop = self._stop_because
            reason = "interrupted"
            try:
                workers = await asyncio.to_thread(self._find_workers, network)
                reason = await self._run_workers(workers)
            finally:
                told.tell(events.End(time_s=time.monotonic() - began_s, reason=reason))
                for worker in self._workers:
                    worker.close()
                if network is not None:
                    network.close()
        return reason

    async def _run_workers(self, workers: Sequence[AgentWorker]) -> str:
        """Run all workers until they end; return why the first one ended.

        If a worker fails, the others are stopped, and its error is raised.
        """
        first, *others = workers
        together = [first] if self._settings.agent.enrol is not None else workers
        for worker in together:
            await self._make(worker)
        self._note_ready()
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run_worker(worker)) for worker in together]
                if together == [first] and others:
                    # The first worker enrols the key that the others use.
                    joined = group.create_task(_joined(first))
                    await asyncio.wait([joined, *running], return_when=asyncio.FIRST_COMPLETED)
                    joined.cancel()
                    for worker in others if first.joined.done() else ():
                        await self._make(worker)
                        group.create_task(self._run_worker(worker))
        except ExceptionGroup as errors:  # the first one is the cause
            error = errors.exceptions[0]
            raise error from error.__cause__
        return self._reason or running[0].result()

    async def _make(self, worker: AgentWorker) -> None:
        self._workers.append(worker)  # so that the worker is closed even if `make` fails
        agent = await asyncio.to_thread(worker.make)
        if self._stopping:
            agent.request_stop()

    async def _run_worker(self, worker: AgentWorker) -> str:
        """Run `worker`; raise `HubUnreachableError` if no hub accepts it within `timeout_s`."""
        agent = worker.agent
        assert agent is not None
        if self._timeout_s is None:
            return await agent.run()
        late = False

        def look() -> None:
            nonlocal late
            late = not worker.joined.done()
            if late:
                agent.request_stop()

        timer = asyncio.get_running_loop().call_later(self._timeout_s, look)
        try:
            reason = await agent.run()
        finally:
            timer.cancel()
        if late:
            trouble = self._trouble or f"{agent.address}: no answer yet; check the address and the network"
            raise HubUnreachableError(f"no hub accepted this device within {self._timeout_s:g} s: {trouble}")
        return reason

    def _request_stop(self) -> None:
        self._each(lambda agent: agent.request_stop())

    def _each(self, action: Callable[[Any], None]) -> None:
        for worker in self._workers:
            if worker.agent is not None:
                action(worker.agent)

    def _stop_because(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.stop()

    @property
    def _in_callback(self) -> bool:
        return self._callbacks.here

    def _find_workers(self, network: ZmqNetwork | None) -> Sequence[AgentWorker]:
        """Read the workers' data and create the workers."""
        section, parts = self._settings.agent, self._parts()
        if section.device_id is None and section.state is None:
            # Without a stored identity, two agents on one machine need different names.
            name = f"{default_device_id()[:57]}-{secrets.token_hex(3)}"
            section = msgspec.structs.replace(section, device_id=name)
        device = find_device(section)
        sense = make_sense() if self._throttles else None
        workers = []
        for number, part in enumerate(parts):
            enrol = section.enrol if number == 0 else None
            own = msgspec.structs.replace(section, seed=section.seed + number, enrol=enrol)
            workers.append(AgentWorker(
                msgspec.structs.replace(self._settings, agent=own),
                device if self._workers_count == 1 else _sub_device(device, number),
                part,
                self._training,
                tell=self._callbacks.tell,
                on_report=self._report,
                network=network,
                sense=sense,
            ))  # fmt: skip
        return workers

    def _parts(self) -> list[Share]:
        if isinstance(self._given, list):
            check_apart(self._given)
            return self._given
        if self._given is not None:
            return [self._given]  # type: ignore[list-item]
        if self._workers_count == 1 and not isinstance(self._data, list):
            return [as_dataset(self._data, "data")]
        return split(self._data, self._workers_count, self._settings.agent.seed)

    def _with_own(self, local: LocalTraining) -> LocalTraining:
        """Return `local` with this device's own settings applied."""
        if not self._own:
            return local
        own = local_training(**self._own)
        return msgspec.structs.replace(local, **{key: getattr(own, key) for key in self._own})

    def _report(self, report: DeviceReport) -> None:
        joined = sum(worker.joined.done() for worker in self._workers)
        if joined == self._workers_count and not self._let_in.done():
            self._let_in.set_result(None)
        if report.event == "unreachable":
            self._trouble = report.detail
        level = logging.WARNING if report.event in ("waiting", "warning", "unreachable") else logging.INFO
        LOG.log(level, "%s: %s", report.event, report.detail)
        if self._on_report is not None:
            self._on_report(report)


def _sorted(keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into training settings and keys of `AgentSettings`.

    Raises `ConfigError` for invalid training settings.
    """
    if twice := sorted({"hub", "data", "device_id"} & keys.keys()):
        instead = "pass name" if twice[0] == "device_id" else "pass it as a named argument"
        raise ConfigError(f"{twice[0]} is not a setting of Agent: {instead}")
    own = {*LocalKeywords.__annotations__, "loss"}
    training = {key: value for key, value in keys.items() if key in own and value is not None}
    return training, {key: value for key, value in keys.items() if key not in own and value is not None}


def _settings_of(keys: Mapping[str, Any], throttle: Mapping[str, object] | None) -> AgentSettings:
    """Build the agent's settings from keyword arguments; raises `ConfigError` for invalid values."""
    said = {key: value for key, value in keys.items() if value is not None}
    if "state" in said:
        said["state"] = str(as_path(said["state"], "state"))
    settings = AgentSettings.of_keys(said, where="Agent")
    if throttle is None:
        return settings
    if not isinstance(throttle, Mapping):
        raise ConfigError(f"throttle is {throttle!r}; pass a dict of [throttle] keys: {{'temperature_c_max': 70}}")
    limits = convert(dict(throttle), ThrottleSection, where="Agent(throttle=...)")
    return msgspec.structs.replace(settings, throttle=limits)


def _check_passes(epochs: float | None, passes: int | None, settings: AgentSettings, *, trained: bool) -> None:
    """Raise `ConfigError` if `epochs` or `passes` is invalid or contradicts other settings."""
    if epochs is not None and (not epochs > 0 or trained):
        raise ConfigError("epochs counts passes over the data: set it above 0, and pass data instead of a trainer")
    if epochs is not None and settings.limits.delay_steps:
        raise ConfigError("delay_steps does not work with epochs: use local_steps_max instead of epochs")
    if passes is not None and (passes < 1 or trained):
        raise ConfigError(
            "passes counts passes over the data: set it to 1 or more, and pass data instead of a trainer"
        )


def _sub_device(device: Device, number: int) -> Device:
    """Return the device of worker `number`: it has the same keys, but its own state folder."""
    state = None if device.state is None else device.state / str(number)
    return Device(f"{device.device_id}/{number}", state, device.keys)


def _count(workers: int | None, given: object, *, trained: bool) -> int:
    """Return the number of workers; raises `ConfigError` if the arguments contradict each other."""
    count = count_workers(workers, given, 1)
    if trained and count > 1 and not isinstance(given, list):
        raise ConfigError(f"workers is {workers}, but there is one trainer: pass a list of one trainer per worker")
    return count


async def _joined(worker: AgentWorker) -> str:
    await asyncio.shield(asyncio.wrap_future(worker.joined))
    return ""
