"""What `push = "auto"` chooses, for a fleet whose machines are busy with other work."""

import random
from collections import Counter

import pytest

from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import STAGES
from edgeasync.protocol.messages import DeviceProfile, ModelVersion, Push

VALUES = 66_000
BYTES_PER_VALUE = {"identity": 4.0, "int8": 1.02, "top_k(0.1)+int8": 0.17}
COARSE = "top_k(0.1)+int8"


class Exchanges:
    """Exchanges of one device, in virtual time: `overhead_s` is drawn for what is neither link nor training."""

    def __init__(self, seed, *, bytes_per_s, load, step_s=0.004, local_steps=5):
        self.random = random.Random(seed)
        self.codecs = CodecAgreement(CodecSettings(), Policy(), VALUES)
        self.member = Member("pi", bytes(16), 1, DeviceProfile(), DeviceMeasurements())
        self.codecs.greet(self.member, STAGES)
        self.bytes_per_s, self.load, self.step_s, self.local_steps = bytes_per_s, load, step_s, local_steps
        self.now_s, self.seq = 0.0, 0
        self.chosen = [self.member.codec_push]

    def overhead_s(self, usual_s):
        """Mostly the usual time, and under load up to a hundred times as long."""
        return usual_s * (self.random.lognormvariate(1.0, 1.2) if self.load else 1.0)

    def run(self, seconds):
        member, end_s = self.member, self.now_s + seconds
        while self.now_s < end_s:
            version = ModelVersion("0" * 16, self.seq)
            member.measurements.assigned_steps = self.local_steps
            member.assign(version, self.local_steps, self.now_s)
            up, down = round(BYTES_PER_VALUE[member.codec_push] * VALUES), round(1.02 * VALUES)
            step_s = self.overhead_s(self.step_s)
            member.link.observe_ping(self.overhead_s(0.001))
            member.link.bytes_up += up
            member.link.bytes_down += down
            moving_s = (up + down) / self.bytes_per_s + self.overhead_s(0.005)
            self.now_s += moving_s + self.local_steps * step_s
            self.seq += 1
            push = Push(
                session=bytes(16), seq=self.seq, base=version, local_steps=self.local_steps, examples=100,
                loss_mean=1.0, loss_variance=0.0, step_s=step_s, codec="int8", checksum=0, payload_bytes=up,
            )  # fmt: skip
            member.observe(push, self.now_s, overlap_steps_max=0, slack_s=15.0)
            self.codecs.choose(member)
            self.chosen.append(member.codec_push)

    @property
    def changes(self):
        return sum(one != other for one, other in zip(self.chosen, self.chosen[1:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_eight_equal_devices_on_busy_machines_send_alike(seed):
    fleet = [Exchanges(8 * seed + number, bytes_per_s=1e9, load=True) for number in range(8)]
    for device in fleet:
        device.run(600.0)
    assert Counter(device.chosen[-1] for device in fleet) == {"int8": 8}
    assert max(device.changes for device in fleet) == 0


@pytest.mark.parametrize("load", [False, True])
def test_a_slow_link_is_known_for_one_soon_and_for_good(load):
    device = Exchanges(1, bytes_per_s=250_000, load=load)
    device.run(15.0)
    assert device.chosen[-1] == COARSE
    device.run(600.0)
    assert device.changes == 1


def test_a_long_period_is_no_reason_for_more_bytes():
    device = Exchanges(1, bytes_per_s=1e6, load=False, local_steps=10_000)
    device.run(3600.0)
    assert "identity" not in device.chosen


def test_a_link_that_is_capped_later_is_noticed():
    device = Exchanges(1, bytes_per_s=100e6, load=True)
    device.run(60.0)
    assert device.chosen[-1] == "int8"
    device.bytes_per_s = 250_000
    device.run(120.0)
    assert device.chosen[-1] == COARSE
