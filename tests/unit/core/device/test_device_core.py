"""Tables of the device's transitions: what comes in, what goes out, and what it does next."""

import itertools
import math
from typing import get_args

import msgspec
import pytest

from edgeasync.core.device.bounds import LOCAL_STEPS_MAX
from edgeasync.core.device.effects import (
    CloseConnection,
    Connect,
    DeviceReport,
    EndAgent,
    InstallModel,
    PrepareTraining,
    ResolvePush,
    SendPush,
    SendToHub,
    Train,
)
from edgeasync.core.device.events import (
    Connected,
    DeviceReceived,
    DeviceReceivedMalformed,
    DeviceStopRequested,
    Disconnected,
    GraphBroken,
    GraphForged,
    GraphHeld,
    GraphMissing,
    Kept,
    ModelInstalled,
    PauseRequested,
    ResumeRequested,
)
from edgeasync.core.device.hub_rotation import BACKOFF_MIN_S
from edgeasync.errors import AccessError, ModelMismatchError, RefusedError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Fetch,
    Goodbye,
    Hello,
    ModelVersion,
    Ping,
    Pong,
    RefusalCode,
    Refuse,
    Status,
)
from tests.support.parts.device_bench import (
    GRAPH,
    KEPT,
    LEASE_S,
    OFFER,
    PROFILE,
    TRAINED,
    WELCOME,
    DeviceBench,
    assignment,
    offline_bench,
    overlap_steps,
)

# -- the way there -------------------------------------------------------------------------------------------


def test_the_happy_way():
    device = DeviceBench()
    hello = Hello("pi-1", b"s" * 16, 3, profile=PROFILE)
    assert device.effects == [Connect(), SendToHub(hello)]
    device.welcome(seq_last=6)
    assert device.kinds == [DeviceReport, PrepareTraining, SendToHub]
    assert device.told == ["joined"]
    assert device.said == [Fetch(device.session, device.core.work.held.version)]
    device.assigned(10)
    assert device.effects == [InstallModel(assignment(10))]
    device.give(ModelInstalled(assignment(10)))
    assert device.effects == [Train(8)]
    for seq, base in ((7, 10), (8, 17)):
        device.trained()
        (effect,) = device.effects
        push = effect.push
        assert (push.session, push.seq, push.base) == (device.session, seq, ModelVersion("0" * 16, base))
        assert (push.local_steps, push.examples, push.loss_mean) == (8, 64, 0.5)
        assert (push.loss_variance, push.step_s, push.codec) == (0.25, 0.125, "identity")
        answer = assignment(17, Ack(seq, Applied(17)))
        device.hears(answer)
        assert device.effects == [
            DeviceReport("answered", "applied 17"),
            ResolvePush(Applied(17)),
            InstallModel(answer),
        ]
        device.give(ModelInstalled(answer))
        assert device.effects == [Train(8)]
    assert device.core.work.updates_answered == 2


# -- no hub --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_way_to_an_absent_hub_is_tried_for_as_long_as_it_takes(seed):
    device = DeviceBench(seed)
    pauses, waits = [], 0
    for _ in range(50):
        opened_s = device.now_s
        device.tick(opened_s + 2.99)
        assert device.effects == []
        device.tick(device.core.next_deadline_s())
        assert device.now_s == opened_s + 3.0
        waits += "waiting" in device.told
        assert CloseConnection in device.kinds
        silent_s = device.now_s
        device.until(Connect)
        assert isinstance(device.said[0], Hello)
        pauses.append(device.now_s - silent_s)
    assert waits == 1
    limits = [min(3.0, 0.1 * 2**attempt) for attempt in range(50)]
    slack = 1e-9
    for pause, limit in zip(pauses, limits, strict=True):
        assert limit / 2 - slack <= pause <= limit + slack
    assert len({round(pause, 6) for pause in pauses[10:]}) > 30


@pytest.mark.parametrize(("accepted_s", "given_up_s"), [(0.05, 3.05), (1.2, 10.8)])
def test_a_hub_that_does_not_greet_is_given_up(accepted_s, given_up_s):
    device = DeviceBench()
    begun_s = device.now_s
    device.give(Connected(), at_s=begun_s + accepted_s)
    assert device.core.next_deadline_s() == pytest.approx(begun_s + given_up_s)
    device.tick(begun_s + given_up_s + 0.001)
    assert device.kinds[0] is CloseConnection
    assert device.give(Connected()).effects == [], "this connection is closed"


def unreachable(device, until_s):
    """Tick until then; return the times, and since when, the device says that it reaches no hub."""
    told = []
    while device.core.next_deadline_s() <= until_s:
        device.tick(device.core.next_deadline_s())
        told += [
            (device.now_s, effect.since_s)
            for effect in device.effects
            if isinstance(effect, DeviceReport) and effect.event == "unreachable"
        ]
    return told


@pytest.mark.parametrize("seed", range(5))
def test_an_absent_hub_is_told_of_once_a_minute(seed):
    device = DeviceBench(seed)
    told = unreachable(device, 700.0)
    assert told[0] == (103.0, 100.0), "at the first attempt that fails, since the start"
    assert {since_s for _, since_s in told} == {100.0}
    pauses = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told)]
    assert len(told) == 10
    assert all(60.0 <= pause < 66.0 for pause in pauses)


def test_a_hub_that_is_lost_is_unreachable_since_it_was_last_heard():
    device = DeviceBench().welcome()
    device.hears(Pong(100.0), at_s=102.5)
    device.give(Disconnected(), at_s=104.0)
    assert device.told == ["disconnected"]
    (first, *_) = unreachable(device, 150.0)
    assert first[0] <= 104.0 + 0.1 + 3.0
    assert first[1] == 102.5
    device.until(Connect)
    device.welcome()
    heard_s = device.now_s
    device.hears(Goodbye("stopping"))
    assert unreachable(device, heard_s + 10.0)[0][1] == heard_s, "another time, told at once"


def test_a_connection_that_breaks_before_the_welcome_is_not_more_news_than_silence():
    device = DeviceBench()
    told = []
    while device.now_s < 200.0:
        device.give(Disconnected())
        told += [device.now_s] * device.told.count("unreachable")
        device.until(Connect)
    assert told[0] == 100.0
    assert len(told) == 2


@pytest.mark.parametrize("code", ["hub_full", "busy"])
def test_a_hub_that_refuses_for_now_was_reached(code):
    device = DeviceBench()
    for _ in range(30):
        device.hears(Refuse(code, "not now", 0.5))
        assert device.told.count("warning") == (code == "hub_full")
        if code == "busy":
            device.tick(device.core.next_deadline_s())
        assert CloseConnection in device.kinds
        assert "unreachable" not in device.told
        device.until(Connect)


def test_several_hubs_are_unreachable_once_each_was_tried():
    times = [at_s for at_s, _ in unreachable(DeviceBench(hubs=3), 200.0)]
    assert 109.0 < times[0] < 110.0
    assert 60.0 <= times[1] - times[0] < 66.0


def test_what_speaks_of_something_else_is_told_with_the_reason_and_no_oftener():
    device = DeviceBench()
    told = []
    while device.now_s < 200.0:
        device.give(DeviceReceivedMalformed("unknown message kind"))
        assert device.effects == []
        device.tick(device.core.next_deadline_s())
        told += [effect.detail for effect in device.effects if isinstance(effect, DeviceReport)]
        device.until(Connect)
    assert [detail for detail in told if "unknown message kind" in detail] == ["unknown message kind"] * 2


def test_a_message_of_a_hub_that_cannot_be_read_is_warned_of():
    device = DeviceBench().welcome().give(DeviceReceivedMalformed("unknown message kind"))
    assert device.effects == [DeviceReport("warning", "the hub sent an invalid message: unknown message kind")]


def test_a_welcome_resets_the_back_off():
    device = DeviceBench()
    for _ in range(10):
        device.until(Connect)
    device.welcome()
    since_s = device.now_s
    device.hears(Goodbye("stopping"))
    assert device.kinds == [CloseConnection, DeviceReport]
    device.until(Connect)
    assert device.now_s - since_s <= 0.1


def test_a_ping_tells_the_clock_once_a_minute():
    device = DeviceBench().training()
    device.core.welcome = msgspec.structs.replace(device.core.welcome, heartbeat_s=20.0, lease_s=1e6)
    clocks = []
    for _ in range(7):
        device.now_s = device.core._ping_at_s
        for effect in device.core.tick(device.now_s, 7, 1e9 + device.now_s):
            clocks += [effect.message.clock_s] if isinstance(effect, SendToHub) else []
    assert [clock is not None for clock in clocks] == [True, False, False, True, False, False, True]
    for strange in (math.nan, -1.0, 1e12):
        device.core._clock_at_s = 0.0
        assert device.core._ping(device.core.welcome, 0.0, 7, strange).clock_s is None


def test_training_goes_on_while_the_hub_is_silent():
    device = DeviceBench().training()
    heard_s = device.now_s
    pings = []
    while "disconnected" not in device.told:
        device.tick(device.core.next_deadline_s(), steps=7)
        pings += device.said
    assert device.now_s == heard_s + LEASE_S
    assert [type(ping) for ping in pings] == [Ping] * len(pings)
    assert pings[0] == Ping(device.session, pings[0].sent_s, 7)
    assert 2 <= len(pings) <= 4
    assert device.core.work.state == "training"
    device.trained()
    assert device.effects == []
    hello = device.until(Hello)
    assert (hello.session, hello.seq_answered) == (device.session, 0)
    device.welcome()
    assert PrepareTraining not in device.kinds
    assert device.pushed == [1]
    (effect,) = [effect for effect in device.effects if isinstance(effect, SendPush)]
    assert effect.push.session == device.session


def test_pongs_keep_the_link_and_measure_it():
    device = DeviceBench().training()
    for number in range(100):
        ping = device.until(Ping, 10.0)
        assert (ping.sent_s, ping.round_trip_s) == (device.now_s, 0.25 if number else 0.0)
        device.hears(Pong(ping.sent_s), device.now_s + 0.25)
        assert device.core.round_trip_s == 0.25
    assert device.core.link == "joined"


@pytest.mark.parametrize("code", ["unknown_session", "sequence"])
def test_a_hub_that_forgot_gets_a_hello_on_a_fresh_connection(code):
    """The old connection may still deliver refusals, and each would void the next session."""
    device = DeviceBench().training().trained()
    device.hears(Refuse(code, "say hello"))
    assert device.kinds == [CloseConnection, DeviceReport]
    refused_s = device.now_s
    device.hears(Refuse(code, "say hello"))
    assert device.ignored == ["Refuse of a session while offline"]
    device.until(Connect)
    assert BACKOFF_MIN_S / 2 <= device.now_s - refused_s <= BACKOFF_MIN_S
    assert [type(said) for said in device.said] == [Hello]
    device.welcome()
    assert device.pushed == [1]


def test_a_model_that_never_comes_is_fetched_again():
    device = DeviceBench().welcome().assigned(3)
    since_s = device.now_s
    device.until(Fetch)
    assert device.now_s == since_s + LEASE_S


# -- the end -------------------------------------------------------------------------------------------------


def test_another_model_at_the_same_address_is_an_error():
    device = DeviceBench().training()
    device.hears(Goodbye("stopping"))
    device.until(Connect)
    device.welcome(spec=ParameterSpec((Parameter("weights", (4,)),)))
    (finish,) = device.effects
    assert isinstance(finish.error, ModelMismatchError)


def test_other_training_of_the_same_model_is_taken_up():
    device = DeviceBench().training()
    device.hears(Goodbye("stopping"))
    device.until(Connect)
    device.welcome(settings={"learning_rate": 0.2})
    assert [effect.welcome.settings for effect in device.effects if isinstance(effect, PrepareTraining)] == [
        {"learning_rate": 0.2}
    ]
    assert device.core.work.state == "training"


FATAL = {
    "protocol_version": RefusedError,
    "retired_state": RefusedError,
    "superseded": RefusedError,
    "model_mismatch": ModelMismatchError,
    "quarantined": RefusedError,
    "hub_full": RefusedError,
    "not_allowed": AccessError,
    "unknown_device": RefusedError,  # which only operators hear
}


TRANSIENT = {"busy", "malformed", "sequence", "unknown_session", "duplicate_device_id"}


def test_every_refusal_is_one_to_end_or_to_try_again():
    assert set(get_args(RefusalCode)) == TRANSIENT | set(FATAL)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("code", "error"), FATAL.items())
def test_refusals_that_waiting_does_not_fix(code, error, joined):
    device = DeviceBench().training() if joined else DeviceBench()
    device.hears(Refuse(code, "go away"))
    (finish,) = device.effects
    assert type(finish.error) is error
    assert str(finish.error) == "go away"
    assert device.core.next_deadline_s() is None
    assert device.tick().effects == device.welcome().effects == device.trained().effects == []


@pytest.mark.parametrize("code", ["hub_full", "quarantined", "duplicate_device_id"])
def test_refusals_that_time_may_fix(code):
    pauses = []
    for seed in range(20):
        device = DeviceBench(seed)
        device.hears(Refuse(code, "later", 30.0))
        assert device.told[0] == "warning"
        assert CloseConnection in device.kinds
        since_s = device.now_s
        device.until(Connect)
        pauses.append(device.now_s - since_s)
    assert min(pauses) >= 31.5
    assert max(pauses) <= 33.0
    assert len(set(pauses)) == 20


def test_a_duplicate_gives_up_after_three_leases():
    device = DeviceBench()
    for _ in range(3):
        device.hears(Refuse("duplicate_device_id", "another is live", 15.0))
        device.until(Connect)
    device.hears(Refuse("duplicate_device_id", "another is live", 15.0))
    (finish,) = device.effects
    assert type(finish.error) is RefusedError
    device = DeviceBench()
    for _ in range(10):
        device.hears(Refuse("duplicate_device_id", "another is live", 15.0))
        device.until(Connect)
        device.welcome()
        device.hears(Goodbye("stopping"))
        device.until(Connect)


def test_a_hub_that_has_finished_ends_the_device_and_one_that_stops_does_not():
    device = DeviceBench().training().hears(Goodbye("stopping"))
    assert device.kinds == [CloseConnection, DeviceReport]
    assert device.core.work.state == "training"
    device.until(Connect)
    device.welcome().hears(Goodbye("finished"))
    assert device.effects == [EndAgent("the hub has finished training")]


@pytest.mark.parametrize("link", ["handshake", "joined", "offline"])
def test_a_person_who_stops_it_makes_it_say_goodbye(link):
    device = DeviceBench()
    if link != "handshake":
        device.training()
    if link == "offline":
        device.hears(Goodbye("stopping"))
    device.give(DeviceStopRequested())
    goodbye = [SendToHub(Goodbye("stopping", device.session))] if link == "joined" else []
    assert device.effects == [*goodbye, EndAgent("stopped")]
    assert device.core.next_deadline_s() is None


@pytest.mark.parametrize("link", ["handshake", "joined", "offline"])
def test_a_pause_is_without_traffic_until_it_is_over(link):
    device = DeviceBench()
    if link != "handshake":
        device.training()
    if link == "offline":
        device.hears(Goodbye("stopping"))
    device.give(PauseRequested(training=False))
    goodbye = [SendToHub(Goodbye("paused", device.session))] if link == "joined" else []
    cut = [] if link == "offline" else [CloseConnection(goodbye=True)]
    assert device.effects == [*goodbye, *cut]
    device.give(PauseRequested(training=True))
    assert (device.effects, device.core.next_deadline_s()) == ([], math.inf)
    device.give(Disconnected()).tick(device.now_s + 1e9)
    assert device.effects == []
    if link != "handshake":
        device.trained()
        assert device.effects == [Train(LOCAL_STEPS_MAX, overlap=True)], "it trains further, and pushes nothing"
    device.give(ResumeRequested())
    assert device.kinds == [Connect, SendToHub]
    device.welcome()
    assert device.pushed == ([] if link == "handshake" else [1])
    assert device.give(ResumeRequested()).effects == []


def test_a_pause_may_be_without_training_and_be_stopped():
    device = offline_bench(20).trained()
    device.give(PauseRequested(training=False))
    assert overlap_steps(device) == []
    device.give(PauseRequested(training=True))
    assert overlap_steps(device) == [LOCAL_STEPS_MAX]
    assert device.give(DeviceStopRequested()).effects == [EndAgent("stopped")]


# -- what does not fit -----------------------------------------------------------------------------------------


def wanting_a_graph():
    return DeviceBench().welcome(**OFFER)


def joined():
    return DeviceBench().welcome()


def lost():
    return DeviceBench().welcome().hears(Goodbye("stopping"))


def training():
    return DeviceBench().training()


def pushing():
    return DeviceBench().training().trained()


TOLD = {
    "Ack while handshake": (DeviceBench, DeviceReceived(Ack(1, Applied(1)))),
    "Assignment while handshake": (DeviceBench, DeviceReceived(assignment(1))),
    "GraphHeader while offline": (lost, DeviceReceived(GRAPH)),
    "Pong while handshake": (DeviceBench, DeviceReceived(Pong(99.0))),
    "Hello while joined": (joined, DeviceReceived(Hello("pi-1", b"s" * 16, 3))),
    "Push while joined": (joined, DeviceReceived(KEPT)),
    "Status while joined": (joined, DeviceReceived(Status())),
    "Welcome while joined": (joined, DeviceReceived(WELCOME)),
    "Welcome while offline": (lost, DeviceReceived(WELCOME)),
    "Refuse of a session while handshake": (DeviceBench, DeviceReceived(Refuse("unknown_session", "who?"))),
    "Refuse of a session while offline": (lost, DeviceReceived(Refuse("sequence", "which?"))),
    "Ack while fetching_graph": (wanting_a_graph, DeviceReceived(Ack(1, Applied(1)))),
    "Assignment while fetching_graph": (wanting_a_graph, DeviceReceived(assignment(1))),
    "Graph while idle": (joined, DeviceReceived(GRAPH)),
    "GraphForged while idle": (joined, GraphForged()),
    "Assignment while training": (training, DeviceReceived(assignment(1))),
    "Assignment while pushing": (pushing, DeviceReceived(assignment(1))),
    "Ack of another update": (pushing, DeviceReceived(Ack(2, Applied(1)))),
    "Trained while idle": (joined, TRAINED),
    "Trained while pushing": (pushing, TRAINED),
}


@pytest.mark.parametrize(("kind", "prepare", "event"), [(kind, *case) for kind, case in TOLD.items()], ids=TOLD)
def test_what_does_not_fit_changes_nothing_and_is_told_once(kind, prepare, event):
    device = prepare()
    before = device.core.link, device.core.work.state, device.core.welcome, device.core.work.held.version
    assert device.give(event).ignored == [kind]
    assert device.give(event).ignored == []
    assert device.core.unexpected.counts == {kind: 2}
    assert before == (device.core.link, device.core.work.state, device.core.welcome, device.core.work.held.version)
    device.core.check()


def waited(prepare):
    """Return a device that has sent something again, since no answer came."""
    device = prepare()
    if device.core.work.state == "pushing":
        device.until(SendPush)
    else:
        device.until(Fetch)
    return device


NORMAL = {
    "ModelInstalled of an earlier assignment": (
        lambda: joined().assigned(3).assigned(4),
        ModelInstalled(assignment(3)),
    ),
    "Kept of an earlier update": (pushing, Kept(9)),
    "GraphHeld while idle": (joined, GraphHeld(fetched=False)),
    "GraphMissing while training": (training, GraphMissing()),
    "GraphBroken while idle": (joined, GraphBroken("late")),
    "Disconnected while offline": (lost, Disconnected()),
    "Trained after the end": (lambda: joined().hears(Goodbye("finished")), TRAINED),
    "DeviceReceived after the end": (lambda: joined().hears(Goodbye("finished")), DeviceReceived(Pong(99.0))),
    "Graph while idle": (lambda: waited(joined), DeviceReceived(GRAPH)),
    "Assignment while pushing": (lambda: waited(pushing), DeviceReceived(assignment(1))),
    "Ack of another update": (lambda: waited(pushing), DeviceReceived(Ack(0, Applied(1)))),
    "Assignment while training": (
        lambda: waited(joined).assigned(1).give(ModelInstalled(assignment(1))),
        DeviceReceived(assignment(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "prepare", "event"), [(kind, *case) for kind, case in NORMAL.items()], ids=NORMAL
)
def test_what_comes_late_on_a_good_link_is_counted_and_not_told(kind, prepare, event):
    device = prepare()
    assert device.give(event).effects == []
    assert device.core.unexpected.counts == {kind: 1}


def test_two_answers_are_normal_only_on_the_connection_on_which_something_was_sent_again():
    device = waited(pushing).reconnect()
    assert device.hears(Ack(9, Applied(1))).ignored == ["Ack of another update"]


def test_a_welcome_lets_the_first_of_each_kind_be_told_again():
    device = joined()
    assert device.hears(GRAPH).ignored == ["Graph while idle"]
    assert device.hears(GRAPH).ignored == []
    assert device.reconnect().hears(GRAPH).ignored == ["Graph while idle"]
    assert device.core.unexpected.counts == {"Graph while idle": 3}


def test_an_assignment_whose_answer_does_not_fit_is_taken_all_the_same():
    device = joined().assigned(1, Ack(3, Applied(1)))
    assert device.kinds == [DeviceReport, InstallModel]
    assert device.told == ["unexpected"]


def test_a_broken_connection_is_opened_again_at_once():
    device = DeviceBench().welcome()
    device.give(Disconnected())
    assert device.effects == [CloseConnection(), DeviceReport("disconnected", "the connection was lost")]
    broken_s = device.now_s
    device.until(Hello)
    assert device.now_s - broken_s <= BACKOFF_MIN_S
    assert device.give(Disconnected()).effects[0] == CloseConnection(), "also during the handshake"
    assert device.give(Disconnected()).effects == [], "it knows already"


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -math.inf, 1e12, -1e12])
def test_a_pong_that_cannot_be_is_not_believed(sent_s):
    device = DeviceBench().training()
    device.hears(Pong(device.now_s - 0.25))
    assert device.core.round_trip_s == 0.25
    device.hears(Pong(sent_s))
    assert device.core.round_trip_s == 0.25
