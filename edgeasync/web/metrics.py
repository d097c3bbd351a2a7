"""Renders the hub's metrics in Prometheus's text format."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgeasync.protocol.status import DeviceState, DeviceStatus
from edgeasync.runtime.hub import HubRuntime
from edgeasync.web.metric_tables import DEVICE_METRICS, HUB_METRICS, HubFigures, MetricRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FRESH_S = 1.0
"""Scrapers share metrics that are at most this old."""

DEVICES_MAX = 1000
"""Maximum number of devices with series of their own."""

DEVICES_AT_A_TIME = 64
"""Number of devices to describe before other work on the event loop has its turn: about 2 ms."""


class HubMetrics:
    """Renders metrics for all scrapers, at most once a second.

    `patterns` select the devices with series of their own. `viewers` and `refused` return what the
    page counts.
    """

    def __init__(
        self,
        hub: HubRuntime,
        patterns: Iterable[str],
        *,
        viewers: Callable[[], int],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._hub = hub
        self._patterns = tuple(patterns)
        self._viewers = viewers
        self._refused = refused
        self._rendered = b""
        self._rendered_s = -math.inf
        self._lock = asyncio.Lock()

    async def render(self) -> bytes:
        """Return the metrics. They may be a second old."""
        async with self._lock:
            if time.monotonic() >= self._rendered_s + FRESH_S:
                registry = CollectorRegistry()
                registry.register(_Collector(self._figures(), await self._devices()))
                ProcessCollector(registry=registry)
                if self._patterns:  # thousands of lines would block the event loop
                    self._rendered = await asyncio.to_thread(generate_latest, registry)
                else:
                    self._rendered = generate_latest(registry)
                self._rendered_s = time.monotonic()
        return self._rendered

    def _figures(self) -> HubFigures:
        totals = self._hub.feed.counters()
        states = dict.fromkeys(get_args(DeviceState), 0) | totals.counts
        return HubFigures(totals.summary, states, self._viewers(), self._refused())

    async def _devices(self) -> list[DeviceStatus]:
        """Return the status of the selected devices, described in slices."""
        if not self._patterns:
            return []
        selected = (
            name
            for name in self._hub.core.members.members
            if any(fnmatchcase(name, pattern) for pattern in self._patterns)
        )
        names = list(itertools.islice(selected, DEVICES_MAX))
        found: list[DeviceStatus] = []
        for begin in range(0, len(names), DEVICES_AT_A_TIME):
            found += self._hub.feed.describe(names[begin : begin + DEVICES_AT_A_TIME])
            await asyncio.sleep(0)
        return found


class _Collector(Collector):
    def __init__(self, figures: HubFigures, devices: list[DeviceStatus]) -> None:
        self._figures = figures
        self._devices = devices

    def collect(self) -> Iterator[Metric]:
        for metric in HUB_METRICS:
            value = metric.read(self._figures)
            family = _family(metric)
            if isinstance(value, Mapping):
                for label, each in sorted(value.items()):
                    family.add_metric([label], float(each))
            elif value is not None:
                family.add_metric([], float(value))
            yield family
        if self._devices:
            for of_device in DEVICE_METRICS:
                family = _family(of_device)
                for device in self._devices:
                    figure = of_device.read(device)
                    if isinstance(figure, int | float):
                        family.add_metric([device.id], figure)
                yield family


def _family(metric: MetricRow) -> CounterMetricFamily | GaugeMetricFamily:
    labels = [metric.label] if metric.label else []
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.words, labels=labels)
