"""A worker's progress output."""

import logging

from edgeasync.async_train.worker import WorkerProgress
from edgeasync.callbacks import ExchangeEvent


def tell(log_frequency, *updates):
    """Show a worker's progress updates with these numbers of steps."""
    progress = WorkerProgress(log_frequency)
    for number, steps in enumerate(updates, 1):
        told = {"loss": 0.5, "examples": 32, "metrics": {"accuracy": 0.75}, "bytes_up": 1, "bytes_down": 1}
        progress.on_exchange(
            ExchangeEvent(
                time_s=0.0,
                device="pi",
                number=number,
                outcome="applied",
                version=number,
                local_steps=steps,
                **told,
            )
        )


def test_progress_is_visible_without_logging_and_is_logged_with_it(capsys, caplog):
    tell(4, 3, 3, 3)
    assert capsys.readouterr().err.splitlines() == [
        "batch 6, version 2: loss 0.5, accuracy 0.75", "batch 9, version 3: loss 0.5, accuracy 0.75",
    ]  # fmt: skip
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "edgeasync.async_train"):
        tell(4, 4)
    assert caplog.messages == ["batch 4, version 1: loss 0.5, accuracy 0.75"]
    assert not capsys.readouterr().err
