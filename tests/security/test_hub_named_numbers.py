"""A device bounds what a hub may ask of it: by a clear refusal, or by the most that makes sense."""

import asyncio
from random import Random
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq

from edgeasync.core.device.bounds import (
    HEADER_BYTES_MAX,
    HEARTBEAT_S_MIN,
    LEASE_S_MAX,
    LOCAL_STEPS_MAX,
    RETRY_AFTER_S_MAX,
    SEQ_MAX,
    SETTINGS_DEPTH_MAX,
    SETTINGS_ITEMS_MAX,
)
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import Connect, EndAgent, InstallModel, Train
from edgeasync.core.device.events import ModelInstalled
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.pending_push import ModelKey, PendingPush
from edgeasync.core.engine.device_engine import DeviceEngine
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ModelMismatchError
from edgeasync.host import host_info
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import PARAMETERS_MAX, Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Deltas,
    Goodbye,
    Hello,
    ModelVersion,
    Ping,
    Push,
    Refuse,
    Rejected,
)
from edgeasync.protocol.transfers import PIECE_BYTES_MAX
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.plan import read_plan
from tests.support.parts.agents import agent_parts
from tests.support.parts.device_bench import KEPT, SPEC, WELCOME, DeviceBench, assignment


def welcomed(device=None, **fields):
    return (device or DeviceBench()).hears(msgspec.structs.replace(WELCOME, **fields))


class EngineBench:
    """A device's engine whose shell does nothing, and all it said."""

    def __init__(self):
        core = DeviceCore(Hello("pi-1", bytes(16), 1), DeviceLimits(), Random(0))
        self.core = core
        self.engine = DeviceEngine(core, Mock(), Mock(), lambda: 1.0)
        self.engine.begin()

    def hears(self, message, payload=None):
        self.engine.on_message(message if isinstance(message, bytes) else wire.encode(message), payload)
        return self

    @property
    def told(self):
        return [call.args[0].detail for call in self.engine._shell.report.call_args_list]

    @property
    def stopped(self):
        return self.engine._shell.stop.called


# -- the welcome -----------------------------------------------------------------------------------------------


def nested(depth):
    settings = {}
    for _ in range(depth - 1):
        settings = {"a": settings}
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        nested(SETTINGS_DEPTH_MAX + 1),
        nested(490),
        {"a": [[[]] * SETTINGS_ITEMS_MAX]},
        {str(number): 0 for number in range(SETTINGS_ITEMS_MAX + 1)},
    ],
    ids=["a little deeper", "490 deep", "a long list", "many keys"],
)
def test_settings_that_are_too_deep_or_too_many_are_no_welcome(settings):
    device = EngineBench().hears(msgspec.structs.replace(WELCOME, settings=settings))
    assert device.core.link == "handshake"
    assert not device.stopped
    assert "the hub's settings" in device.core.handshake.unreadable


def test_lists_as_deep_as_a_header_can_hold_raise_nothing():
    header = wire.encode(WELCOME)
    place = header.index(b"\x80")  # the empty settings
    deep = b"\x81\xa1a" + b"\x91" * 900 + b"\x90"
    device = EngineBench().hears(header[:place] + deep + header[place + 1 :])
    assert device.core.link == "handshake"


def test_settings_as_they_are_meant_to_be_are_welcome():
    assert (
        EngineBench().hears(msgspec.structs.replace(WELCOME, settings=nested(SETTINGS_DEPTH_MAX))).core.link
        == "joined"
    )


def test_a_base_without_a_graph_is_no_welcome():
    device = EngineBench().hears(msgspec.structs.replace(WELCOME, base="0" * 64, base_bytes=1))
    assert device.core.link == "handshake"
    assert "names a base, but no graph" in device.core.handshake.unreadable


@pytest.mark.parametrize("nbytes", [0, 2**53])
def test_a_base_of_an_impossible_size_ends_the_device(nbytes):
    welcome = msgspec.structs.replace(WELCOME, graph="1" * 64, graph_bytes=1, base="0" * 64, base_bytes=nbytes)
    device = DeviceBench().hears(welcome)
    (end,) = [effect for effect in device.effects if isinstance(effect, EndAgent)]
    assert f"base has {nbytes} bytes" in str(end.error)


@pytest.mark.parametrize("seq_last", [SEQ_MAX + 1, 2**53])
def test_a_number_that_leaves_none_for_an_update_is_no_welcome(seq_last):
    device = EngineBench().hears(msgspec.structs.replace(WELCOME, seq_last=seq_last))
    assert device.core.link == "handshake"
    assert "seq_last" in device.core.handshake.unreadable


def test_the_highest_number_leaves_enough():
    device = DeviceBench().training(seq_last=SEQ_MAX).trained()
    assert device.pushed == [SEQ_MAX + 1]
    assert wire.decode(wire.encode(device.effects[0].push)).seq == SEQ_MAX + 1


def test_a_heartbeat_without_a_pause_is_slowed_down():
    device = welcomed(heartbeat_s=1e-300)
    times = []
    for _ in range(5):
        device.until(Ping)
        times.append(device.now_s)
    assert min(np.diff(times)) >= HEARTBEAT_S_MIN * 0.99


def test_a_lease_that_is_over_at_once_is_drawn_out():
    device = welcomed(lease_s=1e-300)
    since_s = device.now_s
    device.hears(Refuse("busy", "later", 1000.0))
    device.until(Ping)
    assert device.now_s - since_s >= HEARTBEAT_S_MIN / 2
    assert device.core.link == "joined"


def test_a_silent_hub_is_given_up_in_an_hour_at_most():
    device = welcomed(heartbeat_s=3600.0, lease_s=86_400.0)
    since_s = device.now_s
    while device.core.link == "joined":
        device.tick(device.core.next_deadline_s())
    assert device.now_s - since_s <= LEASE_S_MAX


def test_a_hub_that_says_it_pings_later_than_its_lease_is_pinged_within_it():
    device = welcomed(heartbeat_s=100.0, lease_s=10.0)
    device.until(Ping)
    assert device.core.link == "joined"


# -- a model's size against the device's memory ----------------------------------------------------------------


def test_a_model_of_more_values_than_the_device_takes_ends_it_with_a_clear_word():
    device = welcomed(DeviceBench(parameters_max=2))
    (stop,) = device.effects
    assert isinstance(stop, EndAgent)
    assert isinstance(stop.error, ModelMismatchError)
    assert "3 values" in str(stop.error)
    assert "2" in str(stop.error)
    assert "parameters_max" in str(stop.error)
    assert welcomed(DeviceBench(parameters_max=3)).core.link == "joined"


def test_nobody_believes_a_model_of_more_than_a_gigabyte():
    spec = ParameterSpec((Parameter("w", (2**40,) * 8),))
    (stop,) = welcomed(spec=spec).effects
    assert isinstance(stop.error, ModelMismatchError)


def make_agent(network=None, **section):
    return AgentRuntime(*agent_parts(None, hub="tcp://127.0.0.1:9", **section), network=network)


def parameters_max_of(agent):
    return agent.core.limits.parameters_max


@pytest.mark.parametrize(
    ("gib", "expected"), [(1, 1 << 26), (0.5, 1 << 25), (64, PARAMETERS_MAX), (0, PARAMETERS_MAX)]
)
def test_without_a_setting_the_machines_memory_bounds_the_model(monkeypatch, gib, expected):
    monkeypatch.setattr(host_info, "memory_bytes", lambda: int(gib * 2**30))
    assert parameters_max_of(make_agent()) == expected
    assert parameters_max_of(make_agent(parameters_max=7)) == 7


def test_a_plan_of_another_model_than_the_welcomes_takes_no_memory():
    """2^48 values would."""
    plan = read_plan({"model": {"kind": "softmax", "inputs": 2**24, "classes": 2**24}})
    data = Dataset.of(np.zeros((4, 8), np.float32), np.zeros(4, np.int64))
    with pytest.raises(ModelMismatchError, match="differs from the hub's model"):
        plan.make_trainer(data, 0, spec=SPEC)


# -- what comes after ------------------------------------------------------------------------------------------


def test_a_long_header_is_only_read_of_a_welcome():
    long = msgspec.structs.replace(WELCOME, settings={"a": "x" * 2 * HEADER_BYTES_MAX})
    device = EngineBench().hears(long)
    assert device.core.link == "joined"
    device.hears(long)
    assert f"exceeds the limit of {HEADER_BYTES_MAX}" in device.told[-1]


def test_the_longest_headers_of_a_sound_hub_are_read():
    sentence = "語" * 1024
    ack = Ack(2**53, Rejected("not_finite"))
    deltas = Deltas(2**53, (2**53,) * 64, 2**64 - 1, "x" * 64)
    longest = Assignment(
        ModelVersion("0" * 16, 2**53), 2**31, "x" * 64, 2**64 - 1, 2**53, 2**53, ack, deltas, "x" * 64
    )
    assert len(wire.encode(longest)) <= HEADER_BYTES_MAX
    assert len(wire.encode(Refuse("busy", sentence, 1e9))) <= HEADER_BYTES_MAX


@pytest.mark.parametrize("code", ["hub_full", "quarantined", "duplicate_device_id"])
def test_nobody_sends_a_device_away_for_years(code):
    device = DeviceBench().hears(Refuse(code, "come again", 1e9))
    since_s = device.now_s
    device.until(Connect, limit_s=RETRY_AFTER_S_MAX + 10)
    assert device.now_s - since_s <= RETRY_AFTER_S_MAX + 10


def test_a_busy_hub_is_asked_again_within_the_hour():
    device = welcomed().hears(Refuse("busy", "later", 1e9))
    assert device.core.work.next_deadline_s() - device.now_s <= 1.5 * RETRY_AFTER_S_MAX


@pytest.mark.parametrize(
    ("asked", "taken"), [(2**31, LOCAL_STEPS_MAX), (LOCAL_STEPS_MAX, LOCAL_STEPS_MAX), (8, 8)]
)
def test_nobody_has_a_device_train_for_ever(asked, taken):
    one = msgspec.structs.replace(assignment(), local_steps=asked)
    device = welcomed().hears(one)
    assert isinstance(device.effects[-1], InstallModel)
    device.give(ModelInstalled(one))
    assert device.effects == [Train(taken)]


def test_differences_longer_than_the_model_are_refused():
    """64 of them might each be as long as the model."""
    spec = ParameterSpec((Parameter("weights", (1000,)),))
    device = EngineBench().hears(msgspec.structs.replace(WELCOME, spec=spec))
    version = ModelVersion("0" * 16, 64)
    device.core.work.held.version = ModelVersion("0" * 16, 0)
    deltas = Deltas(0, (4000,) * 64, 0, "identity")
    device.hears(Assignment(version, 8, "identity", 0, 64 * 4000, 1, None, deltas))
    assert "longer than a whole model" in device.told[-1]
    assert device.engine.transfers._incoming is None


@pytest.mark.parametrize("reason", ["finished", "stopping"])
def test_a_goodbye_before_any_welcome_ends_nothing(reason):
    device = DeviceBench().hears(Goodbye(reason))
    assert not any(isinstance(effect, EndAgent) for effect in device.effects)
    assert device.core.link == "handshake"


# -- the number of an update -----------------------------------------------------------------------------------


def test_no_update_gets_the_number_0():
    pending = PendingPush()
    pending.recall(KEPT, ModelKey.of(WELCOME))
    assert pending.agree(0, KEPT.checksum) == ""
    assert pending.push.seq == 1
    assert pending.seq_last == 0


def test_a_recalled_update_has_a_number_whatever_the_hub_says():
    device = DeviceBench(recall=(KEPT, ModelKey(SPEC.fingerprint, None, "delta")))
    device = welcomed(device, seq_last=0, checksum_last=KEPT.checksum)
    device.core.check()
    (push,) = [effect.push for effect in device.effects if hasattr(effect, "push")]
    assert isinstance(wire.decode(wire.encode(push)), Push)


# -- frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters_max", "graph_bytes_max", "least"),
    [
        (1000, 1000, wire.HEADER_BYTES_MAX),
        (1_000_000, 1000, 4_000_000),
        (1000, 3 << 20, 3 << 20),
        (PARAMETERS_MAX, 1, PIECE_BYTES_MAX),
    ],
)
def test_a_frame_is_no_longer_than_what_it_may_carry(monkeypatch, parameters_max, graph_bytes_max, least):
    limits = []

    class Noting(zmq.Socket):
        def set(self, option, value):
            if option == zmq.MAXMSGSIZE:
                limits.append(value)
            super().set(option, value)

    network = ZmqNetwork()
    monkeypatch.setattr(network.context, "_socket_class", Noting)
    try:
        agent = make_agent(parameters_max=parameters_max, graph_bytes_max=graph_bytes_max, network=network)
        monkeypatch.setattr(asyncio, "get_running_loop", Mock)
        agent.network.begin()
        agent.connect()
        agent.disconnect()
    finally:
        network.close()
    assert least <= limits[0] <= min(least, PIECE_BYTES_MAX) * 1.1 + 4096
