"""Ready-made callbacks for `train`, `Hub` and `Agent`, and the events that callbacks receive.

A callback is a function that receives every event, or an object with methods such as `on_update`.

    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.callbacks import StopWhen, VersionEvent
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> third = StopWhen(lambda event: isinstance(event, VersionEvent) and event.version >= 3)
    >>> data, until = (np.eye(3), np.arange(3)), Stop(minutes=1)
    >>> run = train(SoftmaxModel(inputs=3, classes=3), data, workers=1, until=until, callbacks=[third])
"""

from edgeasync.callbacks.csv_log import CSVLog
from edgeasync.callbacks.progress import Progress
from edgeasync.callbacks.save_best import SaveBest
from edgeasync.callbacks.stop_when import StopWhen
from edgeasync.sdk.callbacks import StopTraining
from edgeasync.sdk.events import Alert as AlertEvent
from edgeasync.sdk.events import Best as BestEvent
from edgeasync.sdk.events import End as EndEvent
from edgeasync.sdk.events import Evaluation as EvaluationEvent
from edgeasync.sdk.events import Event
from edgeasync.sdk.events import Exchange as ExchangeEvent
from edgeasync.sdk.events import Join as JoinEvent
from edgeasync.sdk.events import Leave as LeaveEvent
from edgeasync.sdk.events import Update as UpdateEvent
from edgeasync.sdk.events import Version as VersionEvent

__all__ = [
    "AlertEvent",
    "BestEvent",
    "CSVLog",
    "EndEvent",
    "EvaluationEvent",
    "Event",
    "ExchangeEvent",
    "JoinEvent",
    "LeaveEvent",
    "Progress",
    "SaveBest",
    "StopTraining",
    "StopWhen",
    "UpdateEvent",
    "VersionEvent",
]
