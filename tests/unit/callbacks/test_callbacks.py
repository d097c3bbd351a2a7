"""The ready callbacks: what each shows, writes and ends, given events one by one."""

import doctest

import numpy as np
import pytest

from edgeasync import callbacks
from edgeasync.callbacks import csv_log, progress, save_best, stop_when
from edgeasync.sdk import agent, hub
from edgeasync.sdk import callbacks as dispatch
from edgeasync.sdk.events import HANDLERS


@pytest.mark.parametrize("module", [csv_log, progress, save_best, stop_when, dispatch, agent, hub])
def test_the_examples_run(module, capsys):
    found = doctest.testmod(module, extraglobs={"np": np})
    assert (found.failed, found.attempted > 0) == (0, True)


def test_every_event_has_a_public_name():
    named = {getattr(callbacks, name) for name in callbacks.__all__ if name.endswith("Event")}
    assert named == {callbacks.Event, *HANDLERS}
