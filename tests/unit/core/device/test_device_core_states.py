"""The states of the device's core are assigned in one place each, where the move is checked."""

import ast
import inspect
from random import Random

import pytest

from edgeasync.core.device import device_core, work_cycle
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.errors import TransitionError
from edgeasync.protocol.messages import Hello

STATES = {"link": (device_core, "_move_link"), "state": (work_cycle, "_move")}


def assignments(tree, name):
    """Return the functions that assign an attribute of this name, in the order of the file."""
    return [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load)
    ]


@pytest.mark.parametrize(("state", "module", "move"), [(state, *place) for state, place in STATES.items()])
def test_a_state_is_assigned_by_its_move_alone(state, module, move):
    tree = ast.parse(inspect.getsource(module))
    assert assignments(tree, state) == ["__init__", move]
    assert not any(isinstance(node, ast.Name) and node.id in ("setattr", "vars") for node in ast.walk(tree))


def test_nothing_else_in_the_room_assigns_them():
    for module in (device_core, work_cycle):
        tree = ast.parse(inspect.getsource(module))
        others = [state for state, (home, _) in STATES.items() if home is not module]
        assert not any(assignments(tree, state) for state in others)


def test_a_move_that_the_table_does_not_have_is_an_error_and_changes_nothing():
    core = DeviceCore(Hello("pi-1", bytes(16), 1), DeviceLimits(), Random(0))
    with pytest.raises(TransitionError, match="a device's link cannot change from 'offline' to 'joined'"):
        core._move_link("joined")
    with pytest.raises(TransitionError, match="a device's work cannot change from 'idle' to 'training'"):
        core.work._move("training")
    assert (core.link, core.work.state) == ("offline", "idle")
