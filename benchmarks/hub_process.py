"""A real hub in its own process, with a model of zeros and an optional probe."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop

from edgeasync.config import FilePath
from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.core.hub.events import HubEvent
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, CheckpointSettings, Liveness
from edgeasync.host.host_info import prepare_for_service
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings

ADDRESS = "tcp://127.0.0.1:*"
POLICY = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency())
NEVER = CheckpointSettings(every="1000 hours")
NO_JOURNAL = HubSection(bind=ADDRESS, durability="checkpoint", history_rows_max=0)
HEARTBEAT_S = 1.0
LEASE_S = 5.0
PROBE_S = 0.005


def make_spec(length: int) -> ParameterSpec:
    """Return the layout of a model with one array."""
    return ParameterSpec((Parameter("weights", (length,)),))


def make_model(length: int) -> HostedModel:
    """Return a model of zeros with one array."""
    return HostedModel(spec=make_spec(length), initial=lambda: np.zeros(length, np.float32))


def make_settings(hub: HubSection = NO_JOURNAL, **sections: Any) -> RunSettings:
    """Return the settings of the real hub in all benchmarks: float32 in both directions.

    By default it has no journal and no history, because the baselines have neither.
    """
    return RunSettings(hub=hub, **{"policy": POLICY, "codec": FLOAT32, "checkpoint": NEVER} | sections)


def make_hub(
    length: int,
    run: str,
    pipe: "Connection[Any, None]",
    settings: RunSettings,
    note: Callable[[HubReport], None] = lambda _: None,
) -> HubRuntime:
    """Return the real hub on a model of zeros in the folder `run`; it sends its address."""

    def on_report(report: HubReport) -> None:
        note(report)
        if report.event == "listening":
            pipe.send(report.detail)

    return HubRuntime(
        msgspec.structs.replace(settings, hub=msgspec.structs.replace(settings.hub, run=FilePath(run))),
        make_model(length),
        on_report=on_report,
    )


def serve_hub(length: int, run: str, pipe: "Connection[str, None]", settings: RunSettings | None = None) -> None:
    """Run the real hub as `edgeasync hub` would."""
    prepare_for_service()
    uvloop.run(make_hub(length, run, pipe, settings or make_settings()).run())


@dataclass(frozen=True)
class Looked:
    """A probe's measurements since the last question: loop lag, pings, pushes, live members.

    If the core is timed, they include its slowest event. `cpu_s` is the process's processor time
    since its start. `work_max_ms` is the most processor time that the loop's thread used between
    two wakes of the probe. A longer lag is time in which the machine did not run this thread.
    """

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    work_max_ms: float = 0.0
    pings: int = 0
    pushes: int = 0
    live: int = 0
    slowest_event_ms: float = 0.0
    cpu_s: float = 0.0


class LagProbe:
    """Wakes every 5 ms and records how late it wakes."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []
        self._work_max_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s, begun_s = time.monotonic() + PROBE_S, time.thread_time()
            await asyncio.sleep(PROBE_S)
            self._lags_ms.append(max(0.0, 1e3 * (time.monotonic() - due_s)))
            self._work_max_s = max(self._work_max_s, time.thread_time() - begun_s)

    def look(self) -> Looked:
        """Return the measurements since the last call."""
        lags_ms = self._lags_ms or [0.0]
        work_max_s, self._lags_ms, self._work_max_s = self._work_max_s, [], 0.0
        p50, p99, worst = (float(value) for value in np.percentile(lags_ms, (50, 99, 100)))
        return Looked(p50, p99, worst, 1e3 * work_max_s)


class SlowestEvent:
    """Measures the processor time of every event of the hub core in this process."""

    def __init__(self) -> None:
        self._slowest_s = 0.0
        handle = HubCore.handle

        def timed(core: HubCore, event: HubEvent, now_s: float) -> list[HubEffect]:
            begun_s = time.thread_time()
            try:
                return handle(core, event, now_s)
            finally:
                self._slowest_s = max(self._slowest_s, time.thread_time() - begun_s)

        HubCore.handle = timed  # type: ignore[assignment,method-assign]

    def look_ms(self) -> float:
        """Return the slowest event since the last call."""
        slowest_s, self._slowest_s = self._slowest_s, 0.0
        return 1e3 * slowest_s


def serve_probed_hub(
    length: int,
    run: str,
    pipe: "Connection[Looked | str, None]",
    *,
    policy: Policy = POLICY,
    time_events: bool = False,
) -> None:
    """Run the real hub; send its address, then its probe's measurements on request."""
    allow_many_files()
    prepare_for_service()
    settings = make_settings(policy=policy, liveness=Liveness(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S))
    hub = make_hub(length, run, pipe, settings)
    slowest = SlowestEvent() if time_events else None

    seen: Counter[str] = Counter()

    def describe(looked: Looked) -> Looked:
        nonlocal seen
        core = hub.core
        before, seen = seen, core.messages_accepted.copy()
        return replace(
            looked,
            pings=seen["ping"] - before["ping"],
            pushes=seen["push"] - before["push"],
            live=core.members.live_count,
            slowest_event_ms=0.0 if slowest is None else slowest.look_ms(),
            cpu_s=time.process_time(),
        )

    run_probed(hub.run, pipe, describe)


def run_control(pipe: "Connection[Looked, None]") -> None:
    """Run a probe in an idle loop, to measure the machine's own lag."""
    run_probed(asyncio.Event().wait, pipe, lambda looked: looked)


def run_probed(
    work: Callable[[], Coroutine[Any, Any, object]],
    pipe: "Connection[Any, None]",
    describe: Callable[[Looked], object],
) -> None:
    """Run `work` with a probe in its loop; answer each question with `describe(measurements)`."""

    async def serve() -> None:
        probe = LagProbe()

        def answer() -> None:
            pipe.recv()
            pipe.send(describe(probe.look()))

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        probing = asyncio.create_task(probe.run())
        try:
            await work()
        finally:
            probing.cancel()

    uvloop.run(serve())


def allow_many_files() -> None:
    """Raise the limit of open files to its maximum; each connection needs one or two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
