"""Events for callbacks."""

from edgeasync import callbacks

END = callbacks.EndEvent(time_s=9.0, reason="done")


def update(number, loss=0.5, outcome="applied"):
    return callbacks.UpdateEvent(
        time_s=float(number), device="a", number=number, outcome=outcome, version=number, loss=loss, examples=32,
        local_steps=16, staleness=0,
    )  # fmt: skip


def evaluation(loss, accuracy=None):
    return callbacks.EvaluationEvent(time_s=1.0, version=7, loss=loss, accuracy=accuracy)


def exchange(loss):
    return callbacks.ExchangeEvent(
        time_s=1.0, device="a", number=1, outcome="applied", version=3, loss=loss, examples=32, local_steps=16,
        bytes_up=100, bytes_down=200,
    )  # fmt: skip


def best(arrays, restore=dict):
    return callbacks.BestEvent(time_s=1.0, version=7, loss=0.1, accuracy=None, arrays=arrays, restore=restore)
