"""Devices that hold a coarse model beside the chain: the next difference corrects it."""

import numpy as np
import pytest

from edgeasync.core.arrays.off_chain_models import DIFFERENCES_MAX, OFF_CHAIN_MAX, UNUSED_MAX
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.parameters import Parameter, ParameterSpec
from tests.support.parts import published
from tests.support.parts.published import values

F = np.float32
SPEC = ParameterSpec((Parameter("weights", (10_000,)), Parameter("running_mean", (3,), "statistic")))


class Hub(published.Hub):
    """A model that moves at random, and is published each time."""

    def __init__(self, initial=None, **codec):
        super().__init__(SPEC, CodecSettings(**codec), "float16", initial)
        self.seed = 0
        self.step()

    def step(self, times=1):
        for _ in range(times):
            self.seed += 1
            super().step(self.seed)


class Device(published.Device):
    def __init__(self, hub, name="a"):
        super().__init__(hub, name, coarse=True)

    def catch_up(self):
        """Take the newest model; return its bytes over those of four a value, and what it was."""
        offer = self.take()
        kind = f"whole {offer.codec}"
        if offer.deltas is not None:
            kind = "difference" if offer.deltas.lengths else "nothing"
        return round(len(offer.payload) / SPEC.nbytes, 2), kind

    @property
    def apart(self):
        """How far its model is from the one that is published, in that one's length."""
        published = self.hub.publisher.published.vector
        return np.linalg.norm(self.model.base - published) / np.linalg.norm(published)


def test_a_coarse_whole_model_is_corrected_by_the_next_difference():
    hub = Hub()
    device = Device(hub)
    assert device.catch_up() == (0.25, "whole int8")
    assert 1e-3 < device.apart < 0.02
    assert device.catch_up() == (0.0, "nothing")
    hub.step()
    assert device.catch_up() == (0.25, "difference")
    assert 0 < device.apart < 2e-4


def test_who_stays_holds_the_chains_model_in_the_end():
    hub = Hub()
    device = Device(hub)
    device.catch_up()
    kinds = []
    for _ in range(DIFFERENCES_MAX + 3):
        hub.step()
        kinds.append(device.catch_up()[1])
    assert kinds == ["difference"] * DIFFERENCES_MAX + ["whole float16", "difference", "difference"]
    assert device.apart == 0.0
    assert len(hub.publisher._off_chain) == 0


def test_only_so_many_devices_are_remembered_and_none_for_ever():
    hub = Hub()
    kinds = [Device(hub, number).catch_up()[1] for number in range(OFF_CHAIN_MAX + 2)]
    assert kinds == ["whole int8"] * OFF_CHAIN_MAX + ["whole float16"] * 2
    hub.step(UNUSED_MAX)
    assert Device(hub, "late").catch_up()[1] == "whole float16"
    hub.step()
    assert Device(hub, "later").catch_up()[1] == "whole int8"
    assert len(hub.publisher._off_chain) == 1


@pytest.mark.parametrize(
    ("initial", "codec"),
    [
        (np.where(np.arange(SPEC.length) % 256, values(0, SPEC.length, 1e-3), 1.0).astype(F), {}),
        (np.full(SPEC.length, 3e38, F), {"model": "identity"}),
    ],
    ids=["outliers in every block", "too large"],
)
def test_a_model_that_the_coarse_codec_would_spoil_is_sent_exactly(initial, codec):
    hub = Hub(initial, **codec)
    _, kind = Device(hub).catch_up()
    assert kind in ("whole float16", "whole identity")


def test_at_the_beginning_all_devices_share_the_chain():
    hub = Hub()
    hub.publisher.publish(whole=True)
    assert Device(hub).catch_up() == (0.5, "whole float16")


def test_what_is_coded_in_the_background_is_what_is_offered():
    hub = Hub()
    device = Device(hub)
    for _ in range(2):
        asked = device.number, device.held, device.name
        assert hub.publisher.needs_coding(*asked, coarse=True)
        hub.publisher.prepare(*asked)
        assert not hub.publisher.needs_coding(*asked, coarse=True)
        device.catch_up()
        assert not hub.publisher.needs_coding(device.number, device.held, device.name, coarse=True)
        hub.step()
