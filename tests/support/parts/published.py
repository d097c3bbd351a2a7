"""A model that is published, and devices that take what they are offered of it, through bytes."""

import numpy as np

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import make_codec


def values(seed, length, scale=1.0):
    return (np.random.Generator(np.random.PCG64(seed)).standard_normal(length) * scale).astype(np.float32)


class Hub:
    """A model that moves at random, and what is published of it."""

    def __init__(self, spec, settings, codec, initial=None):
        self.spec, self.codec = spec, codec
        self.model = HubModel(spec, values(0, spec.length) if initial is None else initial, 0, Policy())
        self.publisher = Publisher(spec, self.model, settings)

    def move(self, seed, scale=0.01):
        moved = self.model.current.vector + values(seed, self.spec.length, scale)
        self.model.advance(Snapshot(self.model.current.number + 1, moved))

    def step(self, seed, *, whole=False):
        self.move(seed)
        self.publisher.publish(whole=whole)

    @property
    def number(self):
        return self.publisher.published.number


class Device:
    """Takes what it is offered, and says what it holds."""

    def __init__(self, hub, name="a", *, coarse=False):
        self.hub, self.name, self.coarse = hub, name, coarse
        self.model = DeviceModel(hub.spec)
        self.number = self.held = None

    def take(self):
        """Take the newest model; return the offer."""
        told = {"held": self.held, "owner": self.name, "coarse": True} if self.coarse else {}
        offer = self.hub.publisher.offer(self.number, self.hub.codec, **told)
        assert wire.checksum(offer.payload) == offer.checksum
        payload, codec = memoryview(bytes(offer.payload)), make_codec(offer.codec, self.hub.spec)
        if offer.deltas is None:
            self.model.install(codec.open(payload))
        else:
            assert offer.deltas.base == self.number
            steps, start = [], 0
            for length in offer.deltas.lengths:
                steps.append(codec.open(payload[start : start + length]))
                start += length
            assert start == len(payload)
            rounding = make_codec(offer.deltas.rounding, self.hub.spec)
            self.model.install_deltas(steps, rounding, offer.deltas.checksum)
        self.number, self.held = self.hub.number, self.model.checksum
        return offer
