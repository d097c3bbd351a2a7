"""The metrics of a hub: names, kinds, meanings, and where their values come from."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from edgeasync.protocol.status import HubSummary
from edgeasync.version import VERSION


class HubFigures(NamedTuple):
    """What the hub's metrics are computed from.

    `viewers` is the number of open feeds, and `refused` counts what the page refused, by reason.
    """

    summary: HubSummary
    states: Mapping[str, int]
    viewers: int
    refused: Mapping[str, int]


Figure = float | Mapping[str, float] | None
"""A value, values by label, or `None` if the value is unknown."""


class MetricRow(NamedTuple):
    """A metric, without the suffix `_total` of counters. `label` is empty or the name of its only label.

    `read` returns its value from `HubFigures` or, if the label is `device`, from a `DeviceStatus`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    words: str
    read: Callable[[Any], Figure]
    label: str = ""

    @property
    def shown_name(self) -> str:
        """The name in Prometheus."""
        return self.name + ("_total" if self.kind == "counter" else "")


def _part(name: str, figure: str) -> Callable[[HubFigures], Figure]:
    """Return the reader of a figure in a part of the summary that may be missing."""

    def read(figures: HubFigures) -> Figure:
        part = getattr(figures.summary, name)
        found: Figure = part and getattr(part, figure)
        return found

    return read


HUB_METRICS = (
    MetricRow("edgeasync_build_info", "gauge", "Always 1; the label is the hub's version of edgeasync",
              lambda _: {VERSION: 1}, "version"),
    MetricRow("edgeasync_devices", "gauge", "Devices that the hub knows, by state",
              attrgetter("states"), "state"),
    MetricRow("edgeasync_devices_never_joined", "gauge", "Enrolled devices that have not joined this run",
              lambda figures: len(figures.summary.enrolled_unseen)),
    MetricRow("edgeasync_alarms", "gauge", "Active alarms of devices and of the fleet, at most 100",
              lambda figures: len(figures.summary.alarms)),
    MetricRow("edgeasync_rollbacks", "counter", "Rollbacks of the model",
              attrgetter("summary.rollbacks")),
    MetricRow("edgeasync_model_version", "gauge", "Number of the newest version of the model",
              attrgetter("summary.version")),
    MetricRow("edgeasync_updates_applied", "counter", "Updates folded into the model in this run",
              attrgetter("summary.updates_applied")),
    MetricRow("edgeasync_updates_rejected", "counter", "Updates that never count",
              attrgetter("summary.updates_rejected")),
    MetricRow("edgeasync_updates_duplicate", "counter", "Repeated pushes",
              attrgetter("summary.duplicates")),
    MetricRow("edgeasync_updates_buffered", "gauge", "Updates that wait for the next version",
              attrgetter("summary.updates_buffered")),
    MetricRow("edgeasync_loss", "gauge", "Loss of the devices: the median of the last notes",
              attrgetter("summary.fleet.loss")),
    MetricRow("edgeasync_staleness_mean", "gauge", "Moving average of the staleness of updates, in versions",
              attrgetter("summary.fleet.staleness_mean")),
    MetricRow("edgeasync_evaluation_loss", "gauge", "Loss of the last evaluation",
              _part("evaluation", "loss")),
    MetricRow("edgeasync_evaluation_accuracy_ratio", "gauge", "Share of correct labels in the last evaluation",
              _part("evaluation", "accuracy")),
    MetricRow("edgeasync_best_evaluation_loss", "gauge", "Loss of the best evaluation",
              _part("best", "loss")),
    MetricRow("edgeasync_best_evaluation_accuracy_ratio", "gauge", "Share of correct labels of the best version",
              _part("best", "accuracy")),
    MetricRow("edgeasync_learning_rate_factor_ratio", "gauge",
              "Factor on the hub's learning rate: below 1 after plateaus, remedies and rollbacks",
              attrgetter("summary.learning_rate_factor")),
    MetricRow("edgeasync_messages_accepted", "counter", "Accepted messages, by kind",
              attrgetter("summary.messages_accepted"), "kind"),
    MetricRow("edgeasync_messages_refused", "counter", "Refused messages",
              attrgetter("summary.messages_refused")),
    MetricRow("edgeasync_denied", "counter", "Connections and messages of devices turned away, by reason",
              attrgetter("summary.denied"), "reason"),
    MetricRow("edgeasync_received_bytes", "counter", "Bytes of all messages from devices in this run",
              attrgetter("summary.traffic.bytes_up")),
    MetricRow("edgeasync_sent_bytes", "counter", "Bytes of all messages to devices in this run",
              attrgetter("summary.traffic.bytes_down")),
    MetricRow("edgeasync_disk_failing", "gauge", "1 while the hub cannot write to its disk, otherwise 0",
              lambda figures: bool(figures.summary.disk_trouble)),
    MetricRow("edgeasync_journal_entries", "counter", "Number of the last entry of the journal",
              _part("journal", "entries")),
    MetricRow("edgeasync_journal_written_bytes", "counter", "Bytes written to the journal since the start",
              _part("journal", "bytes")),
    MetricRow("edgeasync_journal_syncs", "counter", "Syncs of the journal since the start",
              _part("journal", "syncs")),
    MetricRow("edgeasync_page_viewers", "gauge", "Viewers whom the hub sends its feed",
              attrgetter("viewers")),
    MetricRow("edgeasync_page_refused", "counter", "Requests and connections that the page refused, by reason",
              attrgetter("refused"), "reason"),
)  # fmt: skip
"""The metrics of the hub, in the order of the output."""

DEVICE_METRICS = (
    MetricRow("edgeasync_device_updates_applied", "counter", "Updates of a device that are part of the model",
              attrgetter("updates_applied"), "device"),
    MetricRow("edgeasync_device_updates_rejected", "counter", "Updates of a device that never count",
              lambda device: sum(device.updates_rejected.values()), "device"),
    MetricRow("edgeasync_device_last_seen_seconds", "gauge", "Seconds since a device's last message",
              attrgetter("last_seen_s"), "device"),
    MetricRow("edgeasync_device_loss", "gauge", "Mean loss of a device's last update",
              attrgetter("loss"), "device"),
    MetricRow("edgeasync_device_examples_per_second", "gauge", "Examples that a device trains on per second",
              attrgetter("examples_per_s"), "device"),
    MetricRow("edgeasync_device_pace_ratio", "gauge", "Share of the time in which a device trains",
              lambda device: device.pace_percent / 100, "device"),
    MetricRow("edgeasync_device_temperature_celsius", "gauge", "A device's hottest sensor",
              attrgetter("temperature_c"), "device"),
    MetricRow("edgeasync_device_received_bytes", "counter", "Bytes of all messages from a device",
              attrgetter("bytes_up"), "device"),
    MetricRow("edgeasync_device_sent_bytes", "counter", "Bytes of all messages to a device",
              attrgetter("bytes_down"), "device"),
)  # fmt: skip
"""The metrics of devices that `devices` of `[metrics]` selects."""
