"""The published chain: hub and devices hold the same bits, whatever each of them missed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN
from edgeasync.core.arrays.delta_chain import Difference, follow
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.parts import published
from tests.support.parts.published import values

F = np.float32
DELTAS = ["int8", "int8(stochastic)", "int4", "top_k(0.1)", "top_k(0.01)+int8", "sign", "bfloat16", "identity"]
MODELS = ["identity", "float16", "bfloat16"]


def make_spec(trained, statistics=3):
    return ParameterSpec((Parameter("weights", (trained,)), Parameter("running_mean", (statistics,), "statistic")))


class Hub(published.Hub):
    def __init__(self, trained, delta, model):
        super().__init__(make_spec(trained), CodecSettings(delta=delta, model=model), model)

    def lag(self):
        """How far the published model is from the model, in its own size."""
        model = self.model.current.vector
        return np.linalg.norm(self.publisher.published.vector - model) / np.linalg.norm(model)


class Device(published.Device):
    def catch_up(self):
        """Take the newest model, which must be the published one to the bit."""
        offer = self.take()
        if self.hub.publisher.published is not self.hub.model.current:
            assert self.model.parameters.tobytes() == self.hub.publisher.published.vector.tobytes()
        return offer


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("delta", DELTAS)
def test_devices_hold_the_same_bits_whatever_each_missed(delta, model):
    hub = Hub(2 * CHUNK + 4097, delta, model)
    always, sometimes = Device(hub), Device(hub)
    always.catch_up()
    sometimes.catch_up()
    for seed in range(1, 8):
        hub.step(seed)
        always.catch_up()
        if seed % 3 == 0:
            sometimes.catch_up()
    Device(hub).catch_up()
    always.catch_up()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DELTAS),
    st.sampled_from(MODELS),
    st.lists(st.sampled_from(["move", "publish", "whole", "catch up", "another"]), max_size=24),
)
def test_any_order_of_publishing_and_catching_up(delta, model, actions):
    hub = Hub(700, delta, model)
    devices = [Device(hub)]
    for seed, action in enumerate(actions, start=1):
        match action:
            case "move":
                hub.move(seed)
            case "publish" | "whole" if hub.number != hub.model.current.number:
                hub.publisher.publish(whole=action == "whole")
            case "another":
                devices.append(Device(hub))
            case "catch up":
                devices[seed % len(devices)].catch_up()
    for device in devices:
        device.catch_up()


@pytest.mark.parametrize("delta", ["int8", "int4", "sign", "top_k(0.1)"])
def test_what_a_step_drops_is_part_of_the_next(delta):
    """The model stands still, and the published one comes as near as its own rounding allows."""
    hub = Hub(5000, delta, "float16")
    for seed in range(1, 5):
        hub.step(seed)
    for _ in range(60):
        hub.move(0, scale=0.0)
        hub.publisher.publish()
    assert hub.lag() < 1e-3


def test_a_device_is_led_on_while_that_is_cheaper_than_the_whole_model():
    hub = Hub(10_000, "int8", "float16")
    device = Device(hub)
    assert device.catch_up().deltas is None
    assert device.catch_up().deltas.lengths == ()
    for missed, led_on in ((1, True), (2, False), (1, True)):
        for seed in range(missed):
            hub.step(10 * missed + seed)
        offer = device.catch_up()
        assert (offer.deltas is not None) == led_on
        assert len(offer.payload) <= make_codec("float16", hub.spec).payload_bytes_max
    hub.step(99)
    assert hub.publisher.offer(hub.number + 1, "float16").deltas is None
    assert hub.publisher.offer(None, "float16").deltas is None


def test_a_leap_is_published_whole():
    hub = Hub(10_000, "top_k(0.01)", "float16")
    device = Device(hub)
    device.catch_up()
    hub.move(1, scale=100.0)
    hub.publisher.publish(whole=True)
    assert hub.lag() < 1e-3
    assert device.catch_up().deltas is None
    hub.step(2)
    assert device.catch_up().deltas is not None


def test_memory_is_bounded_however_long_the_chain_gets():
    hub = Hub(POOLED_BYTES_MIN, "top_k(0.01)+int8", "identity")
    devices = [Device(hub) for _ in range(5)]
    for seed in range(200):
        hub.step(seed)
        devices[seed % 5].catch_up()
        assert sum(len(step) for _, step in hub.publisher._steps) < 4 * hub.spec.length
        assert len(hub.publisher._steps) <= 64
        assert hub.publisher.outdated_alive <= 1


@pytest.mark.parametrize("delta", ["int8", "off"])
def test_payloads_of_earlier_versions_are_counted_while_they_are_sent(delta):
    hub = Hub(POOLED_BYTES_MIN, delta, "float16")
    sent = []
    for number, codec in enumerate(["float16", "float16", "float16", "identity"]):
        hub.move(number)
        if delta != "off":
            hub.publisher.publish()
        sent.append(hub.publisher.offer(None, codec).payload)
        assert hub.publisher.outdated_alive == number
    for left in (2, 1, 0):
        del sent[0]
        assert hub.publisher.outdated_alive == left


def test_without_differences_the_model_itself_is_published():
    hub = Hub(100, "off", "float16")
    hub.move(1)
    assert hub.publisher.published is hub.model.current
    assert hub.publisher.offer(0, "float16").deltas is None
    assert hub.publisher.outdated_alive == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 7), (5, 10), (7, 10), (0, 5), (4, 4)])
def test_a_difference_is_of_the_front_alone(start, stop):
    origin, after = values(1, 10), values(2, 10)
    expected = after.copy()
    expected[:5] -= origin[:5]
    read = Difference(after, origin, 5).read(start, stop, np.empty(10, F))
    assert np.array_equal(read, expected[start:stop])


def test_statistics_are_those_of_the_last_step():
    spec = make_spec(4, statistics=2)
    base, codec = np.ones(6, F), make_codec("identity", spec)
    steps = [codec.open(codec.encode(VectorSource(np.full(6, number, F)))) for number in (2.0, 3.0)]
    follow(base, steps, codec, 4, base)
    assert base.tolist() == [6.0, 6.0, 6.0, 6.0, 3.0, 3.0]


def test_a_model_that_outgrows_its_codec_travels_as_it_is():
    for delta in ("int8", "off"):
        hub = Hub(1000, delta, "float16")
        device = Device(hub)
        device.catch_up()
        grown = hub.model.current.vector.copy()
        grown[7] = 1e5
        hub.model.advance(Snapshot(1, grown))
        if delta != "off":
            hub.publisher.publish()
        assert device.catch_up().codec == "identity"
        assert device.model.parameters[7] == np.float32(1e5)
        hub.move(2)
        if delta != "off":
            hub.publisher.publish()
        assert device.catch_up().codec == ("int8" if delta == "int8" else "identity")
