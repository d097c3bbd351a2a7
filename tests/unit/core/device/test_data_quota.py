"""A device's own limit of a day's bytes: what it tells its hub, and what it does without asking it."""

from random import Random

import pytest

from edgeasync.config import ByteCount
from edgeasync.core.device.data_quota import (
    DAY_S,
    RECORD_EVERY_S,
    RECORDS_A_DAY,
    SPARE_BYTES,
    DataQuota,
    QuotaRecord,
    needed_bytes,
)
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import CloseConnection, Connect, DeviceReport, InstallModel, SendToHub
from edgeasync.core.device.events import DeviceReceived, ModelInstalled, Trained
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Assignment,
    Credit,
    DeviceProfile,
    Fetch,
    Goodbye,
    Hello,
    ModelVersion,
    Piece,
    Welcome,
)
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

SPEC = ParameterSpec((Parameter("w", (250_000,)),))
MODEL = 4 * SPEC.length
LIMIT = 10_000_000
VERSION = ModelVersion("0" * 16, 1)


def device_of(used_bytes=0, remaining_s=DAY_S, limit=LIMIT):
    limits = DeviceLimits(bytes_per_day_max=None if limit is None else ByteCount(limit))
    device = DeviceCore(Hello("pi", bytes(16), 1, profile=DeviceProfile(examples=5)), limits, Random(0))
    device.data_quota.recall(QuotaRecord(used_bytes, remaining_s))
    return device


def welcomed(device, now_s=100.0):
    assert Connect() in device.begin(now_s)
    return device.handle(DeviceReceived(Welcome(bytes(16), SPEC, {}, 0, "identity", 5.0, 15.0, 1 << 20)), now_s)


def rested(device, effects):
    """Assert that the device has left its hub until its day ends; return what it said of that."""
    assert effects[-3:-1] == [SendToHub(Goodbye("stopping", bytes(16))), CloseConnection(goodbye=True)]
    assert isinstance(effects[-1], DeviceReport)
    assert effects[-1].event == "resting"
    assert device.link == "offline"
    device.check()
    return effects[-1].detail


def test_every_hello_says_what_is_left_and_that_pieces_be_small():
    device = device_of(used_bytes=4_000_000, remaining_s=500.0)
    hello = wire.decode(wire.encode(device.begin(100.0)[1].message))
    assert hello.profile == DeviceProfile(
        examples=5, bytes_per_day_max=LIMIT, day_left_bytes=6_000_000, day_remaining_s=500.0
    )
    assert hello.piece_bytes_max == 1 << 16
    device.data_quota.count(1_000_000, 200.0)
    hello = device._greeting.hello(device.welcome, 0, device.data_quota, 300.0)
    assert (hello.profile.day_left_bytes, hello.profile.day_remaining_s) == (5_000_000, 300.0)
    hello = device._greeting.hello(device.welcome, 0, device.data_quota, 600.0)
    assert (hello.profile.day_left_bytes, hello.profile.day_remaining_s) == (LIMIT, DAY_S), "another day"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_model_is_fetched_only_if_the_day_bears_its_update_too(missing):
    device = device_of(used_bytes=LIMIT - needed_bytes(2 * MODEL) + missing, remaining_s=3600.0)
    effects = welcomed(device)
    fetched = any(isinstance(effect, SendToHub) and isinstance(effect.message, Fetch) for effect in effects)
    assert fetched == (not missing)
    if missing:
        assert f"{needed_bytes(2 * MODEL)} are needed; waiting 3600 s until the day ends" in rested(
            device, effects
        )
        assert device.next_deadline_s() == 3700.0
        assert device.tick(3699.0, 0) == []
        assert Connect() in device.tick(3700.0, 0), "the next day"


@pytest.mark.parametrize("transfer", [0, 1])
def test_a_model_that_nobody_asked_for_is_taken_only_if_it_is_here(transfer):
    """A payload in pieces comes only as far as the device credits it."""
    device = device_of()
    welcomed(device)
    first = Assignment(VERSION, 4, "identity", 0, 1000)
    device.handle(DeviceReceived(first), 101.0)
    device.handle(ModelInstalled(first, 0), 102.0)
    device.handle(Trained(4, 32, 0.5, 0.1, 0.1, payload_bytes=1000), 103.0)
    device.data_quota.count(LIMIT - MODEL, 104.0)
    second = Assignment(VERSION, 4, "identity", 0, MODEL, transfer, ack=Ack(1, Applied(2)))
    effects = device.handle(DeviceReceived(second), 105.0)
    assert (InstallModel(second) in effects) == (not transfer)
    if transfer:
        rested(device, effects)
        assert device.work.updates_answered == 1


@pytest.mark.parametrize(("limit", "told"), [(4_423_680, False), (4_423_679, True), (None, False)])
def test_pings_that_eat_up_a_limit_are_told(limit, told):
    warnings = [
        effect.detail
        for effect in welcomed(device_of(limit=limit))
        if isinstance(effect, DeviceReport) and effect.event == "warning"
    ]
    assert ["pings alone take 2211840 bytes a day" in warning for warning in warnings] == [True] * told


def test_a_hub_that_is_gone_after_a_rest_counts_as_silent_from_then_on():
    device = device_of(used_bytes=LIMIT, remaining_s=3600.0)
    device.begin(100.0)
    device.tick(3700.0, 0)
    (told,) = [effect for effect in device.tick(3703.0, 0) if isinstance(effect, DeviceReport) and effect.since_s]
    assert (told.event, told.since_s) == ("unreachable", 3700.0)


def test_a_day_that_has_not_begun_yet_stays_as_it_was_kept():
    """A device that stops while it enrols keeps its day, however long its machine has been up."""
    day = DataQuota(LIMIT)
    day.recall(QuotaRecord(5_000, 60.0))
    assert day.left_bytes(10 * DAY_S) == LIMIT - 5_000
    assert day.record(10 * DAY_S) == QuotaRecord(5_000, 60.0)


def test_the_headers_of_a_long_payloads_pieces_have_their_place():
    payload_bytes = 1 << 30
    headers_bytes = len(wire.encode(Piece(9, payload_bytes, 2**32))) + len(wire.encode(Credit(9, payload_bytes)))
    pieces_bytes = payload_bytes + payload_bytes // PIECE_BYTES_MIN * headers_bytes
    assert needed_bytes(payload_bytes) >= pieces_bytes + SPARE_BYTES


def test_a_length_that_no_model_has_does_not_keep_the_device_away():
    """A hub may announce what it likes: only a model that was installed shows how long the next is."""
    device = device_of()
    welcomed(device)
    hostile = Assignment(VERSION, 4, "identity", 0, 1 << 50, 1)
    device.handle(DeviceReceived(hostile), 101.0)
    assert device.link == "offline"
    assert Connect() in device.tick(100.0 + DAY_S, 0)
    answer = Welcome(bytes(16), SPEC, {}, 0, "identity", 5.0, 15.0, 1 << 20)
    effects = device.handle(DeviceReceived(answer), 101.0 + DAY_S)
    assert any(isinstance(effect, SendToHub) and isinstance(effect.message, Fetch) for effect in effects)


def test_records_are_few_and_never_behind_the_count():
    day = DataQuota(LIMIT)
    day.begin(0.0)
    records, counted = [], 0
    for number in range(10_000):
        now_s = number * DAY_S / 10_001
        record = day.take_due_record(now_s)
        if record is not None:
            records.append(record)
        day.count(1000, now_s)
        counted += 1000
        assert counted <= records[-1].used_bytes
    assert len(records) <= 2 * RECORDS_A_DAY + DAY_S / RECORD_EVERY_S + 2
    day.count(5, DAY_S)
    assert day.take_due_record(DAY_S).used_bytes < 2 * LIMIT / RECORDS_A_DAY, "the next day has a record at once"
    assert day.record(DAY_S + 60.0) == QuotaRecord(5, DAY_S - 60.0)


@pytest.mark.parametrize("run_s", [150.0, 1200.0, 2 * 3600.0])
@pytest.mark.parametrize("nbytes", [5_000, 500_000])
def test_a_board_that_only_ever_loses_its_power_has_a_day_that_ends(run_s, nbytes):
    """A power cut costs at most half of the time before it, and as many bytes as were used, or a piece."""
    limit, record, now_s = 1_000 * MODEL, QuotaRecord(), 0.0
    for _ in range(20):
        day = DataQuota(limit)
        day.recall(record)
        day.begin(now_s)
        before, end_s = record, now_s + run_s
        day.take_due_record(now_s)
        day.count(nbytes, now_s)
        while now_s < end_s:
            record = day.take_due_record(now_s) or record
            now_s = min(end_s, day.record_at_s)
        assert 0.5 * run_s <= before.remaining_s - record.remaining_s <= run_s
        assert nbytes <= record.used_bytes - before.used_bytes <= nbytes + max(nbytes, 1 << 16)


def test_no_record_lasts_longer_than_a_day():
    """A file that says so is refused, and rounding must not write one."""
    for number in range(1000):
        now_s = number * 1234.567891 / 7.0
        day = DataQuota(LIMIT)
        day.begin(now_s)
        assert 0.0 <= day.record(now_s).remaining_s <= DAY_S
        assert 0.0 <= day.take_due_record(now_s).remaining_s <= DAY_S


def test_pings_end_with_the_days_bytes():
    device = device_of()
    welcomed(device)
    device.data_quota.count(LIMIT, 101.0)
    rested(device, device.tick(106.0, 0))
