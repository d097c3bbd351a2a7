"""Events that callbacks receive; each is a frozen struct."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all events.

    `time_s` is the time in seconds since the run began or, for an agent's event, since the agent
    began.

    >>> from edgeasync.callbacks import EndEvent, Event
    >>> isinstance(EndEvent(time_s=60.0, reason="100 updates applied"), Event)
    True
    """

    time_s: float


class Join(Event, frozen=True):
    """A device joined or rejoined the hub.

    >>> from edgeasync.callbacks import JoinEvent
    >>> JoinEvent(time_s=1.5, device="pi-1").device
    'pi-1'
    """

    device: str


class Leave(Event, frozen=True):
    """A device left, expired or was excluded; `detail` is the reason.

    In an agent, the event means that the agent has lost its connection to the hub.

    >>> from edgeasync.callbacks import LeaveEvent
    >>> LeaveEvent(time_s=9.0, device="pi-1", detail="was silent for 15 s").detail
    'was silent for 15 s'
    """

    device: str
    detail: str


class Update(Event, frozen=True):
    """The hub applied, buffered or rejected a device's update.

    `number` counts the device's updates from 1. `outcome` is "applied", "buffered" (until the next
    version), or the reason for which the hub rejected the update. `loss` is the mean loss over the
    update's `local_steps`, or `None` if the device reports no loss. `staleness` is the number of
    versions that the hub created after the version that the update was computed from. `metrics` are
    the metrics that the device reported, by name.

    >>> from edgeasync.callbacks import UpdateEvent
    >>> told = {"loss": 0.5, "examples": 512, "local_steps": 16, "staleness": 0}
    >>> UpdateEvent(time_s=2.0, device="pi-1", number=1, outcome="applied", version=1, **told).metrics
    {}
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
    """The hub created a version of the model.

    `updates` is the number of updates that the hub applied to create this version.

    >>> from edgeasync.callbacks import VersionEvent
    >>> VersionEvent(time_s=2.0, version=7, updates=3).updates
    3
    """

    version: int
    updates: int


class Evaluation(Event, frozen=True):
    """The model was evaluated; `accuracy` is `None` if accuracy is not measured.

    >>> from edgeasync.callbacks import EvaluationEvent
    >>> EvaluationEvent(time_s=2.0, version=7, loss=0.5, accuracy=0.9).accuracy
    0.9
    """

    version: int
    loss: float
    accuracy: float | None


class Best(Event, frozen=True):
    """An evaluation was the best so far; only callbacks with `on_best` receive this event.

    >>> import numpy as np
    >>> from edgeasync.callbacks import BestEvent
    >>> arrays = {"w": np.ones(2, np.float32)}
    >>> best = BestEvent(time_s=2.0, version=7, loss=0.5, accuracy=None, arrays=arrays, restore=dict)
    >>> list(best.model)
    ['w']
    """

    version: int
    loss: float
    accuracy: float | None
    arrays: Mapping[str, npt.NDArray[np.float32]]
    restore: Callable[[Mapping[str, npt.NDArray[np.float32]]], Any]

    @property
    def model(self) -> Any:
        """The model, converted to the type of model that the user passed, as in `Run.model`."""
        return self.restore(self.arrays)


class Alert(Event, frozen=True):
    """The hub warns about a `device` or, if `device` is empty, about the fleet.

    `figures` are the measurements behind an alarm, by name, such as `loss` and `fleet_loss`.

    >>> from edgeasync.callbacks import AlertEvent
    >>> AlertEvent(time_s=2.0, device="", detail="updates pull apart").device
    ''
    """

    device: str
    detail: str
    figures: dict[str, float] = {}


class Exchange(Event, frozen=True):
    """In an agent: the hub has answered update `number`, and the next model is installed.

    `version` is the version number of the installed model. `outcome` is "applied", "buffered"
    (until the next version), or the reason for which the hub rejected the update. `loss` is the
    mean loss over the update's `local_steps`, or `None` if the trainer reports no loss. `metrics`
    are the metrics over the same steps, by name. `bytes_up` and `bytes_down` are the sizes of all
    messages that were sent to and received from the hub since the previous exchange.

    >>> from edgeasync.callbacks import ExchangeEvent
    >>> told = {"loss": 0.5, "examples": 512, "local_steps": 16, "bytes_up": 4096, "bytes_down": 4096}
    >>> ExchangeEvent(time_s=2.0, device="pi-1", number=1, outcome="applied", version=1, **told).bytes_up
    4096
    """

    device: str
    number: int
    outcome: str
    version: int
    loss: float | None
    examples: int
    local_steps: int
    bytes_up: int
    bytes_down: int
    metrics: dict[str, float] = {}


class End(Event, frozen=True):
    """The run or the agent has ended or was interrupted; `reason` describes why.

    >>> from edgeasync.callbacks import EndEvent
    >>> EndEvent(time_s=60.0, reason="100 updates applied").reason
    '100 updates applied'
    """

    reason: str


HANDLERS: dict[type[Event], str] = {
    Join: "on_join",
    Leave: "on_leave",
    Update: "on_update",
    Version: "on_version",
    Evaluation: "on_evaluation",
    Best: "on_best",
    Alert: "on_alert",
    Exchange: "on_exchange",
    End: "on_end",
}
"""The callback method that receives each event type."""

OF_A_HUB: frozenset[type[Event]] = frozenset({Join, Leave, Update, Version, Evaluation, Best, Alert, End})
OF_AN_AGENT: frozenset[type[Event]] = frozenset({Join, Leave, Evaluation, Exchange, Alert, End})
