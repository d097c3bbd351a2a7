"""What callbacks are told: one frozen event for each thing that happens in a run."""

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events; `time_s` is the hub's time, in seconds since the run began."""

    time_s: float


class Join(Event, frozen=True):
    """A device joined, or came back."""

    device: str


class Leave(Event, frozen=True):
    """A device left, was lost, or was shut out; `detail` says why."""

    device: str
    detail: str


class Update(Event, frozen=True):
    """The hub decided about a device's update.

    `number` counts the device's updates from 1. `outcome` is "applied", "buffered" until the next version, or why
    it never counts. `loss` is the mean over its `local_steps`, `None` if the device tells none. `staleness` is by
    how many versions the model had moved on. `metrics` are those that the device has told, by name.
    """

    device: str
    number: int
    outcome: str
    version: int
    loss: float | None
    examples: int
    local_steps: int
    staleness: int
    metrics: dict[str, float] = {}


class Version(Event, frozen=True):
    """The hub made a version of the model of this many `updates`."""

    version: int
    updates: int


class Evaluation(Event, frozen=True):
    """The model was evaluated; `accuracy` is `None` where there is none."""

    version: int
    loss: float
    accuracy: float | None


class Alert(Event, frozen=True):
    """The hub noticed something odd, about a `device` or, if that is empty, about the fleet."""

    device: str
    detail: str


class End(Event, frozen=True):
    """The run ended, or was interrupted."""

    reason: str


HANDLERS: dict[type[Event], str] = {
    Join: "on_join",
    Leave: "on_leave",
    Update: "on_update",
    Version: "on_version",
    Evaluation: "on_evaluation",
    Alert: "on_alert",
    End: "on_end",
}
"""The method of a callback that is given each event."""
