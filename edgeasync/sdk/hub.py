"""`Hub`: a hub in a Python program."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from edgeasync.config import expanded, whole_address, whole_path
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.net.address import DEFAULT_ADDRESS
from edgeasync.policies.policy import Policy
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.events import Best, End, Event, Join, Leave
from edgeasync.sdk.history import History
from edgeasync.sdk.keywords import TrainingKeywords, check_keywords, show_keywords
from edgeasync.sdk.observer import Observer
from edgeasync.sdk.plan import as_path, make_hub, plan_run
from edgeasync.sdk.service import CALL_S, Service
from edgeasync.sdk.stop import Stop
from edgeasync.web.beside import run_with_page

_ELSEWHERE = {key: f"use settings={{'hub': {{'{key}': ...}}}}" for key in HubSection.__struct_fields__} | {
    table: f"use settings={{'{table}': {{...}}}}" for table in RunSettings.__struct_fields__
}
"""How to set the keys and tables of a hub's settings file that are not keyword arguments."""


class Hub(Service):
    """A hub that stores a model and trains it with the devices that join.

    - `model`: as for `train`; layers of `edgeasync.nn` need `input_shape`, the shape of one
      example.
    - `run`: the folder of the run. If the folder already contains a run, that run is resumed.
    - `bind`: the address to listen on. Port `*` selects a free port; `address` then contains it.
    - `local`: patterns of local parameters, such as `["head.*"]` (docs/train/local.md). Each device
      has its own values of these parameters, and does not exchange them.
    - `until`: when training ends; by default, it ends only at `stop`. The hub has no data, so
      `until` cannot count epochs.
    - `keys`: a folder from `edgeasync keys init`. Without keys, a hub accepts other machines only
      if `insecure` is set.
    - `frozen`: "refuse" rejects a device whose frozen arrays differ from those of the hub's model;
      "warn" only logs a warning (docs/train/join.md). If the hub's model has no frozen arrays,
      devices are compared with the first device that joined.
    - `settings`: other keys of a hub's settings file, as tables: `{"hub": {"knocking": True}}`.
      `{"page": {"bind": "127.0.0.1:8555"}}` serves the page in the browser.
    - All other arguments are the same as for `train`.

    `with`, `start` and `wait` raise the hub's errors.

    >>> import tempfile
    >>> from edgeasync import Hub
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> with Hub(SoftmaxModel(inputs=3, classes=2), run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*") as hub:
    ...     hub.status()["version"], sorted(hub.snapshot())
    (0, ['layer0.bias', 'layer0.weight'])
    """

    _afterwards = "; read its run with Run.open(hub.path)"

    @show_keywords
    def __init__(
        self,
        model: object,
        *,
        run: str | Path,
        bind: str = DEFAULT_ADDRESS,
        until: Stop | None = None,
        policy: Policy | None = None,
        evaluate: object = None,
        callbacks: Sequence[Callback] = (),
        input_shape: Sequence[int] | None = None,
        local: Sequence[str] = (),
        seed: int = 0,
        keys: str | Path | None = None,
        insecure: bool = False,
        frozen: str = "refuse",
        trust_code: bool = False,
        settings: Mapping[str, Any] | None = None,
        **training: Unpack[TrainingKeywords],
    ) -> None:
        super().__init__()
        check_keywords(training, Hub, "Hub", _ELSEWHERE)
        if isinstance(until, Stop) and until.epochs is not None:
            raise ConfigError("until.epochs does not work with Hub, which has no data; use Stop(updates=...)")
        self.path = as_path(run, "run")
        """The run's folder."""
        self._model = whole_path(model)
        self._bind = bind = whole_address(bind)
        self._trust_code = trust_code
        self._shape = input_shape
        self._callbacks = callbacks
        said = {"run": str(self.path), "bind": bind, "seed": seed, "insecure": insecure, "frozen": frozen}
        self._planned: dict[str, Any] = {
            "hub": said if keys is None else said | {"keys": str(expanded(keys))},
            "until": until,
            "policy": policy,
            "evaluate": whole_path(evaluate),
            "training": training,
            "seed": seed,
            "settings": settings,
            "local": local,
        }
        self._hub: HubRuntime | None = None
        self._told: Callbacks | None = None
        self._observer: Observer | None = None
        self._urls: Mapping[str, str] = {}
        self._finishing = ""
        self._over = False
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event]]] = []
        self._awaited: list[tuple[Callable[[int], bool], concurrent.futures.Future[None]]] = []

    @property
    def address(self) -> str:
        """The address that the hub listens on."""
        return self._bind if self._hub is None else self._hub.address

    @property
    def page(self) -> str | None:
        """The URL of the page, or of the metrics without a page; `None` without both."""
        return self._urls.get("page", self._urls.get("metrics"))

    def status(self) -> dict[str, Any]:
        """Return the output of `edgeasync status --json` as a dict (docs/reference/json.md).

        The call waits until the returned state is on disk. A call on the hub's own event loop
        cannot wait. It returns the state that was on disk at the previous call.
        """
        hub = self._running
        found: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._call(lambda: hub.ask_status(found.set_result))
        if self._is_here:
            return found.result() if found.done() else hub.status_shown
        return found.result(CALL_S)

    @property
    def history(self) -> History:
        """The run's updates and evaluations, read from disk at each access.

        Updates of the last two seconds may be missing.
        """
        return History.read(self.path)

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return a copy of the newest model: float32 arrays by name."""
        hub = self._running
        vector = self._call(lambda: hub.current)  # a version is never modified
        return {name: array.copy() for name, array in hub.spec.views(vector).items()}

    def finish(self, reason: str = "asked to finish") -> None:
        """End the run for all devices: the hub informs the agents, which then end, too.

        `wait` then returns `reason`. After `stop`, by contrast, the agents wait until the hub is
        started again.
        """
        self._finishing = self._finishing or reason
        self._on_loop(self._request_finish)

    def wait_for(self, devices: int, timeout_s: float | None = None) -> None:
        """Wait until at least `devices` devices are live.

        Raises `TimeoutError`, or `EdgeAsyncError` if the hub ends.
        """
        self._check_may_wait("wait_for", "write `await {0}.wait_for_async(devices)`")
        if not _done(self._until_live(lambda live: live >= devices), timeout_s):
            raise TimeoutError(f"fewer than {devices} devices are live after {timeout_s:g} s")

    async def wait_for_async(self, devices: int) -> None:
        """Wait until at least `devices` devices are live."""
        await asyncio.shield(asyncio.wrap_future(self._until_live(lambda live: live >= devices)))

    def wait_until_left(self, timeout_s: float | None = None) -> None:
        """Wait until no device is live, because every device has left or expired.

        Raises `TimeoutError`, or `EdgeAsyncError` if the hub ends.
        """
        self._check_may_wait("wait_until_left", "write `await {0}.wait_until_left_async()`")
        if not _done(self._until_live(lambda live: not live), timeout_s):
            raise TimeoutError(f"devices are still live after {timeout_s:g} s")

    async def wait_until_left_async(self) -> None:
        """Wait until no device is live."""
        await asyncio.shield(asyncio.wrap_future(self._until_live(lambda live: not live)))

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events from now on, up to and including `End`."""
        listener = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self._from_now_on(lambda: self._listeners.append(listener))
        try:
            while True:
                event = await listener[1].get()
                yield event
                if isinstance(event, End):
                    return
        finally:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

    # -- how it runs -----------------------------------------------------------------------------------------

    @property
    def _running(self) -> HubRuntime:
        if self._hub is None:
            self._call(lambda: None)  # raises an error with the reason
        assert self._hub is not None
        return self._hub

    @property
    def _in_callback(self) -> bool:
        return self._told is not None and self._told.here

    async def _serve(self) -> str:
        shape = self._shape
        if shape is not None and not isinstance(shape, list | tuple):
            raise ConfigError(f"input_shape is {shape!r}; pass the shape of one example as a tuple: (64,)")
        example = None if shape is None else Dataset(np.zeros((1, *shape), np.float32), np.zeros(1, np.int64))
        plan = await asyncio.to_thread(lambda: plan_run(self._model, example, **self._planned))
        async with Callbacks(self._callbacks) as told:
            self._told, reason = told, "interrupted"
            told.on_stop = self.finish
            self._observer = observer = Observer(self._planned["until"], 0, self._tell, listening=self._note_ready)
            self._hub = make_hub(plan, self._bind, observer, trust_code=self._trust_code)
            observer.watch(self._hub, asyncio.get_running_loop())
            if self._finishing:
                observer.finish(self._finishing)
            elif self._stopping:
                self._hub.request_stop()  # so that `run` returns at once
            try:
                found = await run_with_page(self._hub, plan.sections, self._note_page)
                reason = observer.reason or found
            finally:
                observer.end(reason)
                self._over = True
                for _, awaited in self._awaited:
                    awaited.set_exception(EdgeAsyncError(f"the hub has ended: {reason}"))
        return reason

    def _note_page(self, urls: Mapping[str, str], _: object) -> None:
        self._urls = urls

    def _request_stop(self) -> None:
        if self._hub is not None:
            self._hub.request_stop()

    def _abandon(self) -> None:
        if self._hub is not None:
            self._hub.abandon()

    def _request_finish(self) -> None:
        if self._observer is not None:
            self._observer.finish(self._finishing)

    def _tell(self, event: Event) -> None:
        """Pass an event to callbacks and listeners; called on the event loop."""
        assert self._told is not None
        self._told.tell(event)
        if isinstance(event, Best):
            return  # contains a model, which a slow listener would keep in memory
        for loop, queue in tuple(self._listeners):
            with contextlib.suppress(RuntimeError):  # the listener's loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, event)
        if isinstance(event, Join | Leave):
            self._release()

    def _until_live(self, fits: Callable[[int], bool]) -> concurrent.futures.Future[None]:
        awaited: concurrent.futures.Future[None] = concurrent.futures.Future()

        def note() -> None:
            self._awaited.append((fits, awaited))
            self._release()

        self._from_now_on(note)
        return awaited

    def _from_now_on(self, listen: Callable[[], None]) -> None:
        """Call `listen` on the loop; raise `EdgeAsyncError` if `End` was already delivered."""

        def begin() -> None:
            if self._over:  # the hub may still be waiting for callbacks
                raise self._late()
            listen()

        self._call(begin)

    def _release(self) -> None:
        live = self._running.core.members.live_count
        for fits, awaited in self._awaited:
            if fits(live) and not awaited.done():
                awaited.set_result(None)
        self._awaited = [each for each in self._awaited if not each[1].done()]


def _done(awaited: concurrent.futures.Future[None], timeout_s: float | None) -> bool:
    """Return whether `awaited` completes within `timeout_s`; raise its error if it fails."""
    concurrent.futures.wait([awaited], timeout_s)
    if awaited.done():
        awaited.result()
    return awaited.done()
