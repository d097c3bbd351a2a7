"""The states of the device's core are assigned in one place each, where the move is checked."""

from random import Random

import pytest

from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.errors import TransitionError
from edgeasync.protocol.messages import Hello


def test_a_move_that_the_table_does_not_have_is_an_error_and_changes_nothing():
    core = DeviceCore(Hello("pi-1", bytes(16), 1), DeviceLimits(), Random(0))
    with pytest.raises(TransitionError, match="a device's link cannot change from 'offline' to 'joined'"):
        core._move_link("joined")
    with pytest.raises(TransitionError, match="a device's work cannot change from 'idle' to 'training'"):
        core.work._move("training")
    assert (core.link, core.work.state) == ("offline", "idle")
