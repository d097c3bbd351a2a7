"""Tables of the device's transitions: what comes in, what goes out, and what it does next."""

import itertools
import math
import re
from functools import cache
from random import Random
from typing import get_args

import msgspec
import pytest

from edgeasync.core.device.bounds import LOCAL_STEPS_MAX
from edgeasync.core.device.effects import (
    Connect,
    Disconnect,
    FindGraph,
    InstallModel,
    Join,
    PutAside,
    Report,
    ResolvePush,
    ScaleLearningRate,
    Send,
    SendPush,
    Stop,
    TakeGraph,
    Train,
)
from edgeasync.core.device.events import (
    Connected,
    Disconnected,
    GraphBroken,
    GraphForged,
    GraphHeld,
    GraphMissing,
    InstallFailed,
    Kept,
    Malformed,
    ModelInstalled,
    OverlapTrained,
    PauseRequested,
    Received,
    ResumeRequested,
    StopRequested,
    Trained,
    TransferMoved,
)
from edgeasync.core.device.hub_rotation import BACKOFF_MIN_S
from edgeasync.core.device.machine import DeviceCore
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.errors import AccessError, GraphError, ModelMismatchError, RefusedError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Assignment,
    Buffered,
    Deltas,
    DeviceProfile,
    Duplicate,
    Fetch,
    FetchGraph,
    Graph,
    Hello,
    Leave,
    ModelVersion,
    Ping,
    Pong,
    Push,
    RefusalCode,
    Refuse,
    Rejected,
    Status,
    Welcome,
)

SPEC = ParameterSpec((Parameter("weights", (3,)),))
HEARTBEAT_S, LEASE_S = 5.0, 15.0
PROFILE = DeviceProfile(examples=100)
CHECKSUM = 77
FINGERPRINT = "ab" * 32
OFFER = {"graph": FINGERPRINT, "graph_bytes": 1000}
GRAPH = Graph(FINGERPRINT, 0, 1000)
KEPT = Push(bytes(16), 7, ModelVersion("0" * 16, 3), 8, 64, 0.5, 0.25, 0.125, "int8", 1, 12)
TRAINED = Trained(8, 64, 0.5, 0.25, 0.125, checksum=CHECKSUM)
WELCOME = Welcome(bytes(16), SPEC, {}, 0, "identity", HEARTBEAT_S, LEASE_S, 1 << 20)


class DeviceBench:
    """A device core, a clock, and the effects of the last event."""

    def __init__(self, seed=0, *, recall=None, **options):
        self.core = DeviceCore(
            device_id="pi-1",
            state_id=b"s" * 16,
            incarnation=3,
            profile=PROFILE,
            codecs=("identity",),
            fingerprint=None,
            graph_bytes_max=1000,
            random=Random(seed),
            **options,
        )
        if recall is not None:
            self.core.work.recall(*recall)
        self.now_s = 100.0
        self.effects = self.core.begin(self.now_s)
        self.sessions = 0

    def give(self, event, at_s=None):
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.core.handle(event, self.now_s)
        return self

    def hears(self, message, at_s=None):
        return self.give(Received(message), at_s)

    def tick(self, at_s=None, steps=0):
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.core.tick(self.now_s, steps)
        deadline_s = self.core.next_deadline_s()
        assert deadline_s is None or deadline_s > self.now_s
        return self

    def until(self, kind, limit_s=1000.0):
        """Tick from deadline to deadline, the hub answering pings, until an effect of `kind`; return it."""
        end_s = self.now_s + limit_s
        while True:
            self.tick(self.core.next_deadline_s())
            assert self.now_s <= end_s, f"no {kind.__name__} within {limit_s} s"
            for effect in self.effects:
                said = effect.message if isinstance(effect, Send) else effect
                if isinstance(said, kind):
                    return said
                if isinstance(said, Ping):
                    assert self.core.handle(Received(Pong(said.sent_s)), self.now_s) == []

    def welcome(self, seq_last=0, spec=SPEC, settings=None, at_s=None, **graph):
        self.sessions += 1
        message = Welcome(
            self.session, spec, settings or {}, seq_last, "identity", HEARTBEAT_S, LEASE_S, 1 << 20, **graph
        )  # fmt: skip
        return self.hears(message, at_s)

    @property
    def session(self):
        return self.sessions.to_bytes(16, "big")

    def assigned(self, number=0, ack=None, at_s=None):
        return self.hears(assignment(number, ack), at_s)

    def training(self, number=0, seq_last=0):
        """Go the happy way as far as training."""
        return self.welcome(seq_last).assigned(number).give(ModelInstalled(assignment(number)))

    def trained(self, at_s=None):
        return self.give(TRAINED, at_s)

    def reconnect(self, seq_last=0, **fields):
        """Lose the connection and be welcomed again."""
        self.hears(Leave("stopping"))
        self.until(Connect)
        return self.welcome(seq_last, **fields)

    @property
    def said(self):
        return [effect.message for effect in self.effects if isinstance(effect, Send)]

    @property
    def pushed(self):
        """The seqs of the pushes in the last effects."""
        return [effect.push.seq for effect in self.effects if isinstance(effect, SendPush)]

    @property
    def told(self):
        return [effect.event for effect in self.effects if isinstance(effect, Report)]

    @property
    def ignored(self):
        """The kinds of event that the last effects, which do nothing, tell of as not fitting."""
        words = r"a message or result that does not fit: (.+); it is ignored"
        assert all(isinstance(effect, Report) and effect.event == "unexpected" for effect in self.effects)
        return [re.fullmatch(words, effect.detail)[1] for effect in self.effects]

    @property
    def kinds(self):
        return [type(effect) for effect in self.effects]


def assignment(number=0, ack=None):
    """Return the one object that stands for this assignment: the core knows it again by identity."""
    return one_assignment(number, ack)


@cache
def one_assignment(number, ack):
    return Assignment(ModelVersion("0" * 16, number), 8, "identity", 0, 12, 0, ack)


# -- the way there -------------------------------------------------------------------------------------------


def test_the_happy_way():
    device = DeviceBench()
    hello = Hello("pi-1", b"s" * 16, 3, profile=PROFILE)
    assert device.effects == [Connect(), Send(hello)]
    device.welcome(seq_last=6)
    assert device.kinds == [Report, Join, Send]
    assert device.told == ["joined"]
    assert device.said == [Fetch(device.session, device.core.work.version)]
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
        assert device.effects == [Report("answered", "applied 17"), ResolvePush(Applied(17)), InstallModel(answer)]
        device.give(ModelInstalled(answer))
        assert device.effects == [Train(8)]
    assert device.core.work.updates_answered == 2


def test_the_trainers_rate_is_scaled_when_an_assignments_factor_changes():
    device, seen = DeviceBench(), []
    device.welcome(seq_last=0)
    for number, factor in enumerate((1.0, 0.5, 0.5, 1.0), 1):
        ack = None if number == 1 else Ack(number - 1, Applied(number))
        given = msgspec.structs.replace(one_assignment(number, ack), learning_rate_factor=factor)
        device.hears(given)
        device.give(ModelInstalled(given))
        seen.append(device.effects)
        device.trained()
    assert seen == [[Train(8)], [ScaleLearningRate(0.5), Train(8)], [Train(8)], [ScaleLearningRate(1.0), Train(8)]]


def test_an_acknowledgement_alone_is_followed_by_the_assignment():
    device = DeviceBench().training().trained()
    device.hears(Ack(1, Buffered(2)))
    assert device.effects == [Report("answered", "buffered 2"), ResolvePush(Buffered(2))]
    device.assigned(1)
    assert device.kinds == [InstallModel]
    device.give(ModelInstalled(assignment(1))).trained()
    assert device.pushed == [2]


def test_an_assignment_that_does_not_follow_is_fetched():
    device = DeviceBench().training().trained()
    device.hears(Ack(1, Buffered(2)))
    since_s = device.now_s
    assert device.until(Fetch) == Fetch(device.session, device.core.work.version)
    assert device.now_s == since_s + LEASE_S


def test_divergence_is_told_once_until_an_update_is_taken_again():
    device = DeviceBench().training()
    told = []
    for seq, outcome in enumerate([Rejected("not_finite")] * 2 + [Applied(3), Rejected("not_finite")], start=1):
        device.trained()
        device.assigned(4, Ack(seq, outcome))
        told.append([effect.event for effect in device.effects if isinstance(effect, Report)])
        device.give(ModelInstalled(assignment(4, Ack(seq, outcome))))
    assert told == [["answered", "warning"], ["answered"], ["answered"], ["answered", "warning"]]


def test_that_it_starts_over_is_told_once():
    device = DeviceBench().training()
    told = []
    behind = Rejected("behind", preempted=True)
    for seq, outcome in enumerate([behind, behind, Rejected("behind"), behind], start=1):
        device.trained()
        device.assigned(4, Ack(seq, outcome))
        told.append([effect.event for effect in device.effects if isinstance(effect, Report)])
        device.give(ModelInstalled(assignment(4, Ack(seq, outcome))))
    assert told == [["answered", "warning"], ["answered"], ["answered"], ["answered", "warning"]]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_quarantine_is_told_once_and_so_is_its_end(repeated):
    device = DeviceBench().training()
    told = []
    for seq, outcome in enumerate([Rejected("quarantined")] * 2 + [Applied(3)] * 2, start=1):
        device.trained()
        ack = Ack(seq, Duplicate(outcome) if repeated else outcome)
        device.assigned(4, ack)
        told += [effect for effect in device.effects if isinstance(effect, Report) and effect.event != "answered"]
        device.give(ModelInstalled(assignment(4, ack)))
    assert told == [
        Report(
            "quarantined",
            "an operator of the hub has excluded this device: it trains on, and its updates do not count",
        ),
        Report("released", "the updates of this device count again"),
    ]


def test_a_device_that_is_put_aside_says_why_and_until_when():
    device = DeviceBench().welcome()
    device.hears(Refuse("quarantined", "pi-1 sent too much that is malformed", 30.0))
    assert [(effect.event, effect.detail) for effect in device.effects if isinstance(effect, Report)] == [
        ("warning", "pi-1 sent too much that is malformed"),
        ("quarantined", "pi-1 sent too much that is malformed; trying again in 30 s"),
        ("disconnected", "pi-1 sent too much that is malformed"),
    ]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Rejected("stale"), "rejected stale"),
        (Duplicate(Applied(4)), "duplicate of: applied 4"),
        (Duplicate(Buffered(4)), "duplicate of: buffered 4"),
    ],
)
def test_every_outcome_ends_the_push(outcome, words):
    device = DeviceBench().training().trained()
    device.assigned(4, Ack(1, outcome))
    assert device.effects[0] == Report("answered", words)
    device.give(ModelInstalled(assignment(4, Ack(1, outcome)))).trained()
    assert device.pushed == [2]


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
        assert Disconnect in device.kinds
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


def test_a_hub_is_given_time_for_slow_greetings_once_its_machine_has_accepted():
    """With keys they take six round trips, here of 1.2 s each."""
    device = DeviceBench()
    begun_s = device.now_s
    device.give(Connected(), at_s=begun_s + 1.2)
    device.tick(begun_s + 8.4)
    assert device.effects == []
    device.welcome()
    assert device.told == ["joined"]


@pytest.mark.parametrize(("accepted_s", "given_up_s"), [(0.05, 3.05), (1.2, 10.8)])
def test_a_hub_that_does_not_greet_is_given_up(accepted_s, given_up_s):
    device = DeviceBench()
    begun_s = device.now_s
    device.give(Connected(), at_s=begun_s + accepted_s)
    assert device.core.next_deadline_s() == pytest.approx(begun_s + given_up_s)
    device.tick(begun_s + given_up_s + 0.001)
    assert device.kinds[0] is Disconnect
    assert device.give(Connected()).effects == [], "this connection is closed"


def unreachable(device, until_s):
    """Tick until then; return the times, and since when, the device says that it reaches no hub."""
    told = []
    while device.core.next_deadline_s() <= until_s:
        device.tick(device.core.next_deadline_s())
        told += [
            (device.now_s, effect.since_s)
            for effect in device.effects
            if isinstance(effect, Report) and effect.event == "unreachable"
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
    device.hears(Leave("stopping"))
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


def test_a_hub_that_refuses_for_now_was_reached():
    device = DeviceBench()
    for _ in range(30):
        device.hears(Refuse("hub_full", "full", 30.0))
        assert device.told.count("warning") == 1
        assert "unreachable" not in device.told
        device.until(Connect)


def test_a_hub_that_is_busy_was_reached():
    device = DeviceBench()
    for _ in range(10):
        device.hears(Refuse("busy", "the hub's disk cannot be written", 0.5))
        device.tick(device.core.next_deadline_s())
        assert Disconnect in device.kinds
        assert "unreachable" not in device.told
        device.until(Connect)


def test_several_hubs_are_unreachable_once_each_was_tried():
    times = [at_s for at_s, _ in unreachable(DeviceBench(hubs=3), 200.0)]
    assert 109.0 < times[0] < 110.0
    assert 60.0 <= times[1] - times[0] < 66.0


def told_of_silence():
    device = DeviceBench().tick(103.0)
    return [effect for effect in device.effects if isinstance(effect, Report)]


def test_what_speaks_of_something_else_is_told_with_the_reason_and_no_oftener():
    device = DeviceBench()
    told = []
    while device.now_s < 200.0:
        device.give(Malformed("unknown kind of message"))
        assert device.effects == []
        device.tick(device.core.next_deadline_s())
        told += [effect.detail for effect in device.effects if isinstance(effect, Report)]
        device.until(Connect)
    assert [detail for detail in told if "unknown kind" in detail] == ["unknown kind of message"] * 2
    (silent, *_) = [effect for effect in told_of_silence() if effect.event == "unreachable"]
    assert silent.detail == ""


def test_a_message_of_a_hub_that_cannot_be_read_is_warned_of():
    device = DeviceBench().welcome().give(Malformed("unknown kind of message"))
    assert device.effects == [Report("warning", "from the hub: unknown kind of message")]


def test_a_welcome_resets_the_back_off():
    device = DeviceBench()
    for _ in range(10):
        device.until(Connect)
    device.welcome()
    since_s = device.now_s
    device.hears(Leave("stopping"))
    assert device.kinds == [Disconnect, Report]
    device.until(Connect)
    assert device.now_s - since_s <= 0.1


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
    assert Join not in device.kinds
    assert device.pushed == [1]
    (effect,) = [effect for effect in device.effects if isinstance(effect, SendPush)]
    assert effect.push.session == device.session


def test_what_is_trained_on_goes_on_after_the_reconnect():
    device = DeviceBench().training().reconnect()
    assert (device.kinds, device.core.work.state) == ([Report], "training")
    device.trained()
    assert device.pushed == [1]


def test_pongs_keep_the_link_and_measure_it():
    device = DeviceBench().training()
    for _ in range(100):
        ping = device.until(Ping, 10.0)
        assert ping.sent_s == device.now_s
        device.hears(Pong(ping.sent_s), device.now_s + 0.25)
        assert device.core.round_trip_s == 0.25
    assert device.core.link == "joined"


# -- saying it again -----------------------------------------------------------------------------------------


def test_a_push_is_repeated_under_its_number_until_it_is_answered():
    device = DeviceBench().training(seq_last=4).trained()
    assert device.pushed == [5]
    said_s = device.now_s
    for repeat in range(1, 4):
        device.until(SendPush)
        assert device.pushed == [5]
        assert device.now_s == said_s + repeat * LEASE_S
    device.reconnect(seq_last=4)
    assert device.pushed == [5]
    device.reconnect(seq_last=5, checksum_last=CHECKSUM)
    assert device.pushed == [5]
    device.assigned(1)
    assert device.ignored == ["Assignment while pushing"]
    device.assigned(1, Ack(4, Applied(1)))
    assert device.ignored == ["Ack of another update"]
    device.assigned(1, Ack(5, Duplicate(Applied(1))))
    assert device.kinds == [Report, ResolvePush, InstallModel]


def test_a_transfer_that_moves_is_given_time():
    device = DeviceBench().training().trained()
    said_s = device.now_s
    for _ in range(10):
        device.give(TransferMoved(), device.now_s + 10.0)
        device.tick()
        assert device.pushed == []
    device.until(SendPush)
    assert device.now_s == said_s + 100.0 + LEASE_S


@pytest.mark.parametrize("work", ["fetch", "push"])
def test_busy_is_tried_again_but_never_too_early(work):
    pauses = []
    for seed in range(20):
        device = DeviceBench(seed).welcome() if work == "fetch" else DeviceBench(seed).training().trained()
        said_s = device.now_s
        device.hears(Refuse("busy", "later", 0.5))
        assert device.effects == []
        assert isinstance(device.until(Fetch if work == "fetch" else SendPush), Fetch | SendPush)
        pauses.append(device.now_s - said_s)
        assert device.pushed in ([], [1])
    assert min(pauses) >= 0.5
    assert max(pauses) <= 0.75 + 1e-9
    assert len(set(pauses)) == 20


def test_malformed_is_told_and_tried_again():
    device = DeviceBench().training().trained()
    said_s = device.now_s
    device.hears(Refuse("malformed", "bits fell out"))
    assert device.told == ["warning"]
    device.until(SendPush)
    assert 1.5 <= device.now_s - said_s <= 3.0


@pytest.mark.parametrize("code", ["unknown_session", "sequence"])
def test_a_hub_that_forgot_gets_a_hello_on_a_fresh_connection(code):
    """On the old one more refusals may be on their way: each would void the session that comes next."""
    device = DeviceBench().training().trained()
    device.hears(Refuse(code, "say hello"))
    assert device.kinds == [Disconnect, Report]
    refused_s = device.now_s
    device.hears(Refuse(code, "say hello"))
    assert device.ignored == ["Refuse of a session while offline"]
    device.until(Connect)
    assert BACKOFF_MIN_S / 2 <= device.now_s - refused_s <= BACKOFF_MIN_S
    assert device.said == [device.core._hello(device.now_s)]
    device.welcome()
    assert device.pushed == [1]


SEQUENCES = {
    "nothing lost": (5, 1, 6),
    "the answer was lost": (6, CHECKSUM, 6),
    "the hub remembers less": (2, 1, 3),
    "the hub remembers nothing": (0, 0, 1),
}


def test_a_welcome_that_came_late_does_not_take_numbers_back():
    """A link that repeats and delays: the next update would get the number of one that counts."""
    device = DeviceBench().training(seq_last=6).trained()
    device.hears(Ack(7, Applied(3)))
    assert device.welcome(seq_last=6).ignored == ["Welcome while joined"]
    device.hears(Refuse("unknown_session", "who?"))
    assert device.welcome(seq_last=6).ignored == ["Welcome while offline"]
    device.until(Connect)
    device.welcome(seq_last=7)
    assert device.core.link == "joined"
    device.assigned(4).give(ModelInstalled(assignment(4))).trained()
    assert device.effects[0].push.seq == 8
    device.reconnect(seq_last=2)
    assert device.core.link == "joined", "on a fresh connection the hub is believed: it may have been put back"


@pytest.mark.parametrize(("seq_last", "checksum_last", "expected"), SEQUENCES.values(), ids=SEQUENCES)
def test_numbers_after_a_reconnect(seq_last, checksum_last, expected):
    device = DeviceBench().training(seq_last=5).trained()
    device.reconnect(seq_last, checksum_last=checksum_last)
    assert device.pushed == [expected]
    device.assigned(1, Ack(expected, Applied(1)))
    device.give(ModelInstalled(assignment(1, Ack(expected, Applied(1))))).trained()
    assert device.pushed == [expected + 1]


def test_numbers_that_went_back_stay_back():
    """A hub put back to older state and then started again must not hold the numbers of before for answered."""
    device = DeviceBench().training(seq_last=5).trained().reconnect(seq_last=2)
    device.hears(Leave("stopping"))
    assert device.until(Hello).seq_answered == 4, "the number after that of the update, which is 3 by now"
    device.welcome(seq_last=2)
    assert device.pushed == [3]


RECORDS = {
    "of this update": (4, CHECKSUM, [4]),
    "of this update, under the number it had before": (7, CHECKSUM, [7]),
    "of another update that had the number": (4, 1, []),
    "of a later update": (5, 1, []),
    "of none: it had the number from the device": (4, 0, []),
    "of an earlier update": (3, 1, [4]),
    "of nothing at all": (0, 0, [1]),
}


@pytest.mark.parametrize(("seq_last", "checksum_last", "expected"), RECORDS.values(), ids=RECORDS)
def test_a_number_names_an_update_only_with_its_checksum(seq_last, checksum_last, expected):
    """After two backups that were put back a hub may have answered another update under the number of this one."""
    device = DeviceBench().training(seq_last=6).trained()
    assert device.pushed == [7]
    assert device.reconnect(seq_last=3, checksum_last=1).pushed == [4]
    device.reconnect(seq_last, checksum_last=checksum_last)
    assert device.pushed == expected
    if not expected:
        assert device.told == ["joined", "warning"]
        assert device.said == [Fetch(device.session, device.core.work.version)]
        device.assigned(9).give(ModelInstalled(assignment(9))).trained()
        assert device.pushed == [seq_last + 1]
    else:
        device.assigned(9, Ack(expected[0], Duplicate(Applied(4))))
        assert ResolvePush(Duplicate(Applied(4))) in device.effects


def test_an_update_that_never_left_takes_whatever_number_is_next():
    device = DeviceBench().training(seq_last=5)
    device.hears(Leave("stopping"))
    device.trained()
    device.until(Connect)
    assert device.welcome(seq_last=9, checksum_last=1).pushed == [10]


def test_a_push_the_hub_has_gone_past_is_given_up():
    """A copy of this device went further. The push gets no answer; under a new number it could count twice."""
    device = DeviceBench().training(seq_last=5).trained().reconnect(seq_last=9)
    assert device.told == ["joined", "warning"]
    assert device.said == [Fetch(device.session, device.core.work.version)]
    device.assigned(20).give(ModelInstalled(assignment(20))).trained()
    assert device.pushed == [10]


def test_a_device_that_restarts_takes_the_hubs_word_for_its_numbers():
    device = DeviceBench().training(seq_last=41).trained()
    assert device.pushed == [42]


# -- assignments ---------------------------------------------------------------------------------------------


def test_assignments_that_come_twice():
    device = DeviceBench().training(3)
    device.assigned(4)
    assert device.ignored == ["Assignment while training"]
    device.give(ModelInstalled(assignment(3)))
    assert device.effects == []
    device.trained()
    device.assigned(4)
    assert device.ignored == ["Assignment while pushing"]
    answer = assignment(5, Ack(1, Applied(5)))
    copy = msgspec.structs.replace(answer)
    device.hears(answer)
    assert InstallModel in device.kinds
    device.hears(copy)
    assert device.told == ["unexpected"], "its answer has come before"
    assert device.effects[-1] == InstallModel(copy)
    assert device.give(ModelInstalled(answer)).effects == []
    assert device.give(ModelInstalled(copy)).effects == [Train(8)]


def test_only_the_newest_of_two_assignments_is_trained_from():
    """Both are decoded into the same memory, so what lies there in the end is the second."""
    device = DeviceBench().welcome().assigned(3).assigned(4)
    device.give(ModelInstalled(assignment(3)))
    assert device.effects == []
    device.give(ModelInstalled(assignment(4)))
    assert device.effects == [Train(8)]
    assert device.core.work.version.number == 4


def test_a_model_that_comes_in_broken_is_fetched_again():
    device = DeviceBench().welcome().assigned(3)
    device.give(InstallFailed("checksum"))
    assert device.told == ["warning"]
    since_s = device.now_s
    device.until(Fetch)
    assert device.now_s == pytest.approx(since_s + 0.1)


@pytest.mark.parametrize("work", ["training", "pushing"])
def test_a_broken_copy_of_what_is_installed_already_disturbs_nothing(work):
    device = DeviceBench().training()
    if work == "pushing":
        device.trained()
    device.give(InstallFailed("a second copy of the assignment came in broken"))
    assert device.told == ["warning"]
    assert device.core.work.state == work
    if work == "training":
        device.trained()
        assert device.pushed == [1]
    device.assigned(1, Ack(1, Applied(1)))
    assert InstallModel in device.kinds


def test_a_model_that_was_coming_in_when_the_link_broke_is_fetched_again():
    device = DeviceBench().welcome().assigned(3).reconnect()
    assert device.said == [Fetch(device.session, device.core.work.version)]
    device.give(ModelInstalled(assignment(3)))
    assert device.effects == []
    device.assigned(4).give(ModelInstalled(assignment(4)))
    assert device.effects == [Train(8)]


def test_a_model_that_never_comes_is_fetched_again():
    device = DeviceBench().welcome().assigned(3)
    since_s = device.now_s
    device.until(Fetch)
    assert device.now_s == since_s + LEASE_S


# -- the end -------------------------------------------------------------------------------------------------


def test_another_model_at_the_same_address_is_an_error():
    device = DeviceBench().training()
    device.hears(Leave("stopping"))
    device.until(Connect)
    device.welcome(spec=ParameterSpec((Parameter("weights", (4,)),)))
    (finish,) = device.effects
    assert isinstance(finish.error, ModelMismatchError)


def test_other_training_of_the_same_model_is_taken_up():
    device = DeviceBench().training()
    device.hears(Leave("stopping"))
    device.until(Connect)
    device.welcome(settings={"learning_rate": 0.2})
    assert [effect.welcome.settings for effect in device.effects if isinstance(effect, Join)] == [
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
        assert Disconnect in device.kinds
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
        device.hears(Leave("stopping"))
        device.until(Connect)


def test_a_hub_that_has_finished_ends_the_device_and_one_that_stops_does_not():
    device = DeviceBench().training().hears(Leave("stopping"))
    assert device.kinds == [Disconnect, Report]
    assert device.core.work.state == "training"
    device.until(Connect)
    device.welcome().hears(Leave("finished"))
    assert device.effects == [Stop("the hub has finished training")]


@pytest.mark.parametrize("link", ["handshake", "joined", "offline"])
def test_a_person_who_stops_it_makes_it_say_goodbye(link):
    device = DeviceBench()
    if link != "handshake":
        device.training()
    if link == "offline":
        device.hears(Leave("stopping"))
    device.give(StopRequested())
    goodbye = [Send(Leave("stopping", device.session))] if link == "joined" else []
    assert device.effects == [*goodbye, Stop("stopped")]
    assert device.core.next_deadline_s() is None


@pytest.mark.parametrize("link", ["handshake", "joined", "offline"])
def test_a_pause_is_without_traffic_until_it_is_over(link):
    device = DeviceBench()
    if link != "handshake":
        device.training()
    if link == "offline":
        device.hears(Leave("stopping"))
    device.give(PauseRequested(training=False))
    goodbye = [Send(Leave("paused", device.session))] if link == "joined" else []
    cut = [] if link == "offline" else [Disconnect(goodbye=True)]
    assert device.effects == [*goodbye, *cut]
    device.give(PauseRequested(training=True))
    assert (device.effects, device.core.next_deadline_s()) == ([], math.inf)
    device.give(Disconnected()).tick(device.now_s + 1e9)
    assert device.effects == []
    if link != "handshake":
        device.trained()
        assert device.effects == [Train(LOCAL_STEPS_MAX, overlap=True)], "it trains further, and pushes nothing"
    device.give(ResumeRequested())
    assert device.kinds == [Connect, Send]
    device.welcome()
    assert device.pushed == ([] if link == "handshake" else [1])
    assert device.give(ResumeRequested()).effects == []


def test_a_pause_may_be_without_training_and_be_stopped():
    device = offline_bench(20).trained()
    device.give(PauseRequested(training=False))
    assert overlap_steps(device) == []
    device.give(PauseRequested(training=True))
    assert overlap_steps(device) == [LOCAL_STEPS_MAX]
    assert device.give(StopRequested()).effects == [Stop("stopped")]


# -- what does not fit -----------------------------------------------------------------------------------------


def wanting_a_graph():
    return DeviceBench().welcome(**OFFER)


def joined():
    return DeviceBench().welcome()


def lost():
    return DeviceBench().welcome().hears(Leave("stopping"))


def training():
    return DeviceBench().training()


def pushing():
    return DeviceBench().training().trained()


TOLD = {
    "Ack while handshake": (DeviceBench, Received(Ack(1, Applied(1)))),
    "Assignment while handshake": (DeviceBench, Received(assignment(1))),
    "Graph while offline": (lost, Received(GRAPH)),
    "Pong while handshake": (DeviceBench, Received(Pong(99.0))),
    "Hello while joined": (joined, Received(Hello("pi-1", b"s" * 16, 3))),
    "Push while joined": (joined, Received(KEPT)),
    "Status while joined": (joined, Received(Status())),
    "Welcome while joined": (joined, Received(WELCOME)),
    "Welcome while offline": (lost, Received(WELCOME)),
    "Refuse of a session while handshake": (DeviceBench, Received(Refuse("unknown_session", "who?"))),
    "Refuse of a session while offline": (lost, Received(Refuse("sequence", "which?"))),
    "Ack while fetching_graph": (wanting_a_graph, Received(Ack(1, Applied(1)))),
    "Assignment while fetching_graph": (wanting_a_graph, Received(assignment(1))),
    "Graph while idle": (joined, Received(GRAPH)),
    "GraphForged while idle": (joined, GraphForged()),
    "Assignment while training": (training, Received(assignment(1))),
    "Assignment while pushing": (pushing, Received(assignment(1))),
    "Ack of another update": (pushing, Received(Ack(2, Applied(1)))),
    "Trained while idle": (joined, TRAINED),
    "Trained while pushing": (pushing, TRAINED),
}


@pytest.mark.parametrize(("kind", "prepare", "event"), [(kind, *case) for kind, case in TOLD.items()], ids=TOLD)
def test_what_does_not_fit_changes_nothing_and_is_told_once(kind, prepare, event):
    device = prepare()
    before = device.core.link, device.core.work.state, device.core.welcome, device.core.work.version
    assert device.give(event).ignored == [kind]
    assert device.give(event).ignored == []
    assert device.core.unexpected == {kind: 2}
    assert before == (device.core.link, device.core.work.state, device.core.welcome, device.core.work.version)
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
    "Trained after the end": (lambda: joined().hears(Leave("finished")), TRAINED),
    "Received after the end": (lambda: joined().hears(Leave("finished")), Received(Pong(99.0))),
    "Graph while idle": (lambda: waited(joined), Received(GRAPH)),
    "Assignment while pushing": (lambda: waited(pushing), Received(assignment(1))),
    "Ack of another update": (lambda: waited(pushing), Received(Ack(0, Applied(1)))),
    "Assignment while training": (
        lambda: waited(joined).assigned(1).give(ModelInstalled(assignment(1))),
        Received(assignment(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "prepare", "event"), [(kind, *case) for kind, case in NORMAL.items()], ids=NORMAL
)
def test_what_comes_late_on_a_good_link_is_counted_and_not_told(kind, prepare, event):
    device = prepare()
    assert device.give(event).effects == []
    assert device.core.unexpected == {kind: 1}


def test_two_answers_are_normal_only_on_the_connection_on_which_something_was_sent_again():
    device = waited(pushing).reconnect()
    assert device.hears(Ack(9, Applied(1))).ignored == ["Ack of another update"]


def test_a_welcome_lets_the_first_of_each_kind_be_told_again():
    device = joined()
    assert device.hears(GRAPH).ignored == ["Graph while idle"]
    assert device.hears(GRAPH).ignored == []
    assert device.reconnect().hears(GRAPH).ignored == ["Graph while idle"]
    assert device.core.unexpected == {"Graph while idle": 3}


def test_an_assignment_whose_answer_does_not_fit_is_taken_all_the_same():
    device = joined().assigned(1, Ack(3, Applied(1)))
    assert device.kinds == [Report, InstallModel]
    assert device.told == ["unexpected"]


# -- the hub's graph -----------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_is_not_fetched():
    device = DeviceBench().welcome(**OFFER)
    assert device.effects == [Report("joined", "as pi-1"), FindGraph(FINGERPRINT)]
    device.give(GraphHeld(fetched=False))
    assert device.kinds == [Report, Join, Send]
    assert device.effects[0] == Report("graph", "from the cache, 1000 bytes")
    assert device.said == [Fetch(device.session, device.core.work.version)]


def test_nothing_is_answered_before_the_graph_is_here():
    key = ModelKey(SPEC.fingerprint, FINGERPRINT, "delta")
    device = DeviceBench(recall=(KEPT, key)).welcome(**OFFER)
    answer = Ack(KEPT.seq, Applied(1))
    for message in (answer, assignment(1, answer)):
        device.hears(message)
        assert (device.ignored, device.core.work.state) == (
            [f"{type(message).__name__} while fetching_graph"],
            "fetching_graph",
        )
    device.core.check()


def test_a_graph_that_is_missing_is_fetched_before_anything_else():
    device = DeviceBench().welcome(**OFFER).give(GraphMissing())
    assert device.effects == [Send(FetchGraph(device.session))]
    assert device.assigned(1).ignored == ["Assignment while fetching_graph"]
    device.hears(GRAPH)
    assert device.effects == [TakeGraph(GRAPH)]
    device.give(GraphHeld(fetched=True))
    assert device.effects[0] == Report("graph", "fetched, 1000 bytes")
    assert device.kinds == [Report, Join, Send]
    device.assigned(1).give(ModelInstalled(assignment(1))).trained()
    assert device.pushed == [1]


def wanting():
    """Return a device that has asked for the hub's graph."""
    return DeviceBench().welcome(**OFFER).give(GraphMissing())


def test_a_graph_that_does_not_come_is_asked_for_again():
    device = wanting()
    since_s = device.now_s
    assert device.until(FetchGraph) == FetchGraph(device.session)
    assert device.now_s == since_s + LEASE_S


def test_a_graph_that_moves_is_given_time():
    device = wanting().hears(GRAPH)
    since_s = device.now_s
    for _ in range(10):
        device.give(TransferMoved(), device.now_s + 10.0)
        assert device.tick().said in ([], [Ping(device.session, device.now_s, 0)])
    device.until(FetchGraph)
    assert device.now_s == since_s + 100.0 + LEASE_S


def test_a_busy_hub_is_asked_for_its_graph_again():
    device = wanting()
    since_s = device.now_s
    assert device.hears(Refuse("busy", "later", 0.5)).effects == []
    device.until(FetchGraph)
    assert 0.5 <= device.now_s - since_s <= 0.75 + 1e-9


def test_a_graph_that_comes_in_broken_is_asked_for_again():
    device = wanting().hears(GRAPH).give(GraphBroken("checksum"))
    since_s = device.now_s
    assert device.told == ["warning"]
    device.until(FetchGraph)
    assert 1.5 <= device.now_s - since_s <= 3.0
    device.hears(GRAPH).give(GraphHeld(fetched=True))
    assert device.said == [Fetch(device.session, device.core.work.version)]


@pytest.mark.parametrize("way", ["asked", "coming in"])
def test_a_graph_survives_an_offline_spell(way):
    device = wanting()
    if way == "coming in":
        device.hears(GRAPH)
    device.hears(Leave("stopping"))
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.effects[-1] == FindGraph(FINGERPRINT)
    device.give(GraphMissing())
    assert device.said == [FetchGraph(device.session)]
    device.hears(GRAPH).give(GraphHeld(fetched=True))
    assert Join in device.kinds


def test_a_graph_that_is_kept_while_the_link_is_down_is_there_at_the_next_welcome():
    device = wanting().hears(GRAPH).hears(Leave("stopping"))
    device.give(GraphHeld(fetched=True))
    assert device.kinds == [Report]
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.kinds == [Report, Join, Send]
    assert device.said == [Fetch(device.session, device.core.work.version)]


def test_a_graph_that_is_held_is_not_asked_for_after_a_reconnect():
    device = DeviceBench().welcome(**OFFER).give(GraphHeld(fetched=False)).assigned(1)
    device.give(ModelInstalled(assignment(1))).trained().hears(Leave("stopping"))
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.pushed == [1]
    assert device.kinds == [Report, SendPush]


def test_what_is_known_of_a_graph_too_late_changes_nothing():
    device = DeviceBench().welcome(**OFFER).give(GraphHeld(fetched=False))
    for event in (GraphHeld(fetched=True), GraphMissing(), GraphBroken("late")):
        assert device.give(event).effects == []
    assert device.give(GraphForged()).ignored == ["GraphForged while idle"]
    assert device.hears(GRAPH).ignored == ["Graph while idle"]
    offline = wanting().hears(Leave("stopping"))
    assert offline.give(GraphMissing()).effects == []


@pytest.mark.parametrize("size", [0, 1001, 2**53])
def test_a_graph_of_a_wrong_size_ends_the_device_before_it_is_fetched(size):
    device = DeviceBench().welcome(graph=FINGERPRINT, graph_bytes=size)
    (finish,) = device.effects
    assert type(finish.error) is GraphError
    assert "graph_bytes_max" in str(finish.error)


@pytest.mark.parametrize(
    "event",
    [
        GraphForged(),
        Received(msgspec.structs.replace(GRAPH, fingerprint="cd" * 32)),
        Received(msgspec.structs.replace(GRAPH, payload_bytes=999)),
    ],
)
def test_a_graph_that_is_not_the_one_announced_ends_the_device(event):
    (finish,) = wanting().give(event).effects
    assert type(finish.error) is GraphError


@pytest.mark.parametrize("graph", [None, "cd" * 32])
def test_another_graph_at_the_same_address_is_another_model(graph):
    device = DeviceBench().welcome(**OFFER).give(GraphHeld(fetched=False)).hears(Leave("stopping"))
    device.until(Connect)
    device.welcome(**{**OFFER, "graph": graph})
    (finish,) = device.effects
    assert isinstance(finish.error, ModelMismatchError)


def test_a_broken_connection_is_opened_again_at_once():
    device = DeviceBench().welcome()
    device.give(Disconnected())
    assert device.effects == [Disconnect(), Report("disconnected", "the connection broke")]
    broken_s = device.now_s
    device.until(Hello)
    assert device.now_s - broken_s <= BACKOFF_MIN_S
    assert device.give(Disconnected()).effects[0] == Disconnect(), "also during the handshake"
    assert device.give(Disconnected()).effects == [], "it knows already"


def test_a_ping_tells_how_long_the_last_one_took():
    device = DeviceBench().welcome()
    first = device.until(Ping)
    assert first.round_trip_s == 0.0
    device.hears(Pong(device.now_s - 0.25))
    assert device.until(Ping).round_trip_s == 0.25


# -- overlap -------------------------------------------------------------------------------------------------


def overlap_bench(steps):
    """A device that trains, and may train on while it waits."""
    return DeviceBench().welcome(overlap_steps_max=steps).assigned(0).give(ModelInstalled(assignment(0)))


def test_overlap_steps_count_among_the_next():
    device = overlap_bench(4)
    device.trained()
    assert device.effects[-1] == Train(4, overlap=True)
    answer = assignment(1, Ack(1, Applied(1)))
    device.hears(answer)
    device.give(OverlapTrained(Trained(3, 24, 1.0, 0.5, 0.25)))
    device.give(ModelInstalled(answer))
    assert device.effects == [Train(5)]
    device.give(Trained(5, 40, 0.5, 0.25, 0.125))
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.local_steps, push.overlap_steps, push.examples) == (8, 3, 64)
    assert push.loss_mean == pytest.approx((3 * 1.0 + 5 * 0.5) / 8)
    assert push.step_s == pytest.approx((3 * 0.25 + 5 * 0.125) / 8)
    # The variance of all eight losses: within each part, and between the two means.
    assert push.loss_variance == pytest.approx((3 * 0.5 + 5 * 0.25) / 8 + (3 / 8) * (5 / 8) * 0.25)


def test_at_least_one_step_is_taken_from_the_new_model():
    device = overlap_bench(100)
    device.trained()
    answer = assignment(1, Ack(1, Applied(1)))
    device.hears(answer)
    device.give(OverlapTrained(Trained(50, 400, 1.0, 0.5, 0.25)))
    device.give(ModelInstalled(answer))
    assert device.effects == [Train(1)]


@pytest.mark.parametrize(
    "outcome",
    [Rejected("not_finite"), Rejected("behind", preempted=True), Duplicate(Rejected("behind", preempted=True))],
)
def test_steps_that_went_on_from_a_diverged_update_do_not_count(outcome):
    device = overlap_bench(4)
    device.trained()
    answer = assignment(1, Ack(1, outcome))
    device.hears(answer)
    device.give(OverlapTrained(Trained(3, 24, math.nan, math.nan, 0.25)))
    device.give(ModelInstalled(answer))
    assert device.effects == [Train(8)]
    device.trained()
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.local_steps, push.overlap_steps) == (8, 0)


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -math.inf, 1e12, -1e12])
def test_a_pong_that_cannot_be_is_not_believed(sent_s):
    device = DeviceBench().training()
    device.hears(Pong(device.now_s - 0.25))
    assert device.core.round_trip_s == 0.25
    device.hears(Pong(sent_s))
    assert device.core.round_trip_s == 0.25


# -- without the hub -----------------------------------------------------------------------------------------


def offline_bench(steps, overlap=0):
    """A device that trains, and may train on without the hub."""
    device = DeviceBench(offline_steps_max=steps).welcome(overlap_steps_max=overlap)
    return device.assigned(0).give(ModelInstalled(assignment(0)))


def overlap_steps(device):
    """The overlap steps that the last effects ask for."""
    return [effect.local_steps for effect in device.effects if isinstance(effect, Train) and effect.overlap]


def test_a_device_pauses_by_default_when_the_hub_is_gone():
    device = DeviceBench().training()
    device.hears(Leave("stopping"))
    assert device.trained().effects == []


def test_a_device_that_is_cut_off_trains_on_to_its_limit_and_merges_when_it_is_back():
    device = offline_bench(20)
    assert device.core.work.may_overlap
    device.hears(Leave("stopping"))
    assert overlap_steps(device) == [], "the assigned steps are not done yet"
    device.trained()
    assert device.told == ["alone"]
    assert overlap_steps(device) == [20]
    for _ in range(3):
        device.until(Connect)
        assert overlap_steps(device) == []
    device.give(OverlapTrained(Trained(20, 160, 0.5, 0.25, 0.125)))
    assert device.effects == [], "that was all"
    device.welcome(overlap_steps_max=0)
    assert device.pushed == [1]
    answer = assignment(9, Ack(1, Applied(9)))
    device.hears(answer).give(ModelInstalled(answer))
    assert device.effects == [Train(1)]
    device.give(Trained(1, 8, 0.5, 0.25, 0.125))
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.seq, push.local_steps, push.overlap_steps) == (2, 21, 20)


@pytest.mark.parametrize("work", ["pushing", "answered"])
def test_a_device_goes_alone_when_the_hub_goes_after_its_update(work):
    device = offline_bench(20).trained()
    assert overlap_steps(device) == []
    if work == "answered":
        device.hears(Ack(1, Buffered(1)))
    device.hears(Leave("stopping"))
    assert device.told == ["disconnected", "alone"]
    assert overlap_steps(device) == [20]
    device.until(Connect)
    device.welcome()
    device.hears(Leave("stopping"))
    assert overlap_steps(device) == [], "they are not done yet"


def test_a_busy_hub_leaves_a_device_alone():
    device = offline_bench(20).trained()
    device.hears(Refuse("busy", "later", 0.5))
    assert (device.told, overlap_steps(device)) == (["alone"], [20])
    device.hears(Refuse("busy", "later", 0.5))
    assert device.effects == []


def test_steps_that_were_not_taken_are_allowed_later():
    device = offline_bench(20)
    device.hears(Leave("stopping"))
    device.trained()
    assert overlap_steps(device) == [20]
    device.give(OverlapTrained(Trained(7, 56, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == [13]
    device.give(Kept(1))
    assert overlap_steps(device) == [13], "paused before its first step"
    device.give(OverlapTrained(Trained(13, 104, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == []


@pytest.mark.parametrize(("trains_at_rest", "steps"), [(False, []), (True, [20])])
def test_a_device_that_trains_at_rest_takes_its_steps_alone(trains_at_rest, steps):
    device = DeviceBench(offline_steps_max=20, trains_at_rest=trains_at_rest).welcome()
    device.assigned(0).give(ModelInstalled(assignment(0))).trained()
    device.hears(Ack(1, Applied(1)))
    device.hears(Refuse("busy", "rest for 60 s: the model stands still", 60.0, rest=True))
    assert overlap_steps(device) == steps
    assert device.told[0] == "resting"
    since_s = device.now_s
    assert device.until(Fetch).session == device.session
    assert device.now_s == since_s + 60.0, "it asks when the rest is over, and not before"


@pytest.mark.parametrize(("alone", "more"), [(20, [16]), (4, []), (3, []), (0, [])])
def test_alone_the_larger_limit_holds_and_one_call_at_a_time(alone, more):
    device = offline_bench(alone, overlap=4).trained()
    assert overlap_steps(device) == [4]
    device.hears(Leave("stopping"))
    assert overlap_steps(device) == [], "the first four are not done yet"
    device.give(OverlapTrained(Trained(4, 32, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == more
    assert ("alone" in device.told) == bool(more)


def test_a_device_does_not_go_on_from_what_diverged():
    device = offline_bench(20).trained()
    device.hears(Ack(1, Rejected("not_finite")))
    device.hears(Leave("stopping"))
    assert overlap_steps(device) == []


def test_a_device_without_a_model_does_not_go_alone():
    device = DeviceBench(offline_steps_max=20).welcome()
    device.hears(Leave("stopping"))
    assert overlap_steps(device) == []
    device.until(Connect)
    device.welcome().assigned(0).hears(Leave("stopping"))
    assert overlap_steps(device) == []


# -- several hubs --------------------------------------------------------------------------------------------


def openings(device, count):
    """Tick until `count` connections were opened; return which hub each was to."""
    hubs = []
    for _ in range(count):
        device.until(Connect)
        hubs.append(device.core.hub)
    return hubs


def test_a_hub_that_does_not_answer_gives_way_to_the_next():
    device = DeviceBench(hubs=3)
    assert device.core.hub == 0
    assert openings(device, 5) == [1, 2, 0, 1, 2]


def test_every_hub_that_is_tried_is_told_of_once():
    device, told = DeviceBench(hubs=3), 0
    for _ in range(40):
        device.tick(device.core.next_deadline_s())
        told += device.told.count("waiting")
    assert told == 4


def test_a_list_of_hubs_is_tried_no_faster_than_one():
    device = DeviceBench(hubs=2)
    openings(device, 12)
    since_s = device.now_s
    openings(device, 10)
    assert 45.0 <= device.now_s - since_s <= 60.0


def test_a_hub_that_is_lost_is_tried_again_first():
    device = DeviceBench(hubs=2)
    assert openings(device, 1) == [1]
    device.welcome().hears(Leave("stopping"))
    assert openings(device, 3) == [1, 0, 1]


def test_a_full_hub_gives_way_at_once_and_is_not_asked_before_its_time():
    device = DeviceBench(hubs=2)
    full_s = device.now_s
    device.hears(Refuse("hub_full", "full", 30.0))
    assert openings(device, 1) == [1]
    assert device.now_s - full_s <= 0.1
    while device.core.hub == 1:
        openings(device, 1)
    assert 30.0 <= device.now_s - full_s <= 40.0
    device.welcome()
    assert device.core.link == "joined"


@pytest.mark.parametrize("code", ["quarantined", "duplicate_device_id"])
def test_what_a_device_has_done_is_not_escaped_by_another_hub(code):
    device = DeviceBench(hubs=2)
    device.hears(Refuse(code, "later", 30.0))
    assert openings(device, 1) == [0]


ELSEWHERE = {
    "that has none and takes no word": (0, 0, [1]),
    "with an older state": (3, 1, [4]),
    "with an empty state, which takes the device's word": (7, 0, []),
    "with the same state, and the answer lost": (6, CHECKSUM, [6]),
}


@pytest.mark.parametrize(("seq_last", "checksum_last", "expected"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_numbers_at_another_hub(seq_last, checksum_last, expected):
    device = DeviceBench(hubs=2).training(seq_last=5).trained()
    device.hears(Leave("stopping"))
    while device.core.hub != 1 or device.core.link != "handshake":
        device.until(Connect)
    assert device.said[-1].seq_answered == 7
    device.welcome(seq_last, checksum_last=checksum_last)
    assert device.pushed == expected


# -- after a power cut ---------------------------------------------------------------------------------------

KEY = ModelKey(SPEC.fingerprint, None, "delta")


def recalling(key=KEY):
    """A device that was started again with an update that may have been answered."""
    return DeviceBench(recall=(KEPT, key))


def test_a_kept_update_is_repeated_under_its_number():
    device = recalling()
    assert device.effects[1].message.seq_answered == 8, "it may have been answered"
    device.welcome(seq_last=6)
    assert device.kinds == [Report, Join, SendPush]
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert push == msgspec.structs.replace(KEPT, session=device.session)
    device.until(SendPush)
    device.until(SendPush)
    device.assigned(4, Ack(7, Applied(4)))
    device.give(ModelInstalled(assignment(4, Ack(7, Applied(4))))).trained()
    assert device.pushed == [8]


def test_a_kept_update_that_was_answered_gets_its_outcome():
    device = recalling().welcome(seq_last=7, checksum_last=KEPT.checksum)
    assert device.pushed == [7]
    device.hears(Refuse("busy", "later", 0.5))
    device.until(SendPush)
    device.assigned(9, Ack(7, Duplicate(Applied(4))))
    assert device.kinds == [Report, ResolvePush, InstallModel]
    device.give(ModelInstalled(assignment(9, Ack(7, Duplicate(Applied(4)))))).trained()
    assert device.pushed == [8]


def test_a_hub_that_forgot_the_device_never_counts_a_kept_update():
    """It takes the device's word for the number, and so shows that it has no record."""
    device = recalling().welcome(seq_last=8)
    assert device.told == ["joined", "warning"]
    assert device.said == [Fetch(device.session, None)]
    device.assigned(9).give(ModelInstalled(assignment(9))).trained()
    assert device.pushed == [9]


@pytest.mark.parametrize("away_s", [BACKOFF_MIN_S, LEASE_S + 1, 1e6], ids=["a blink", "over a lease", "days"])
@pytest.mark.parametrize("cut_off", [Leave("stopping"), Refuse("unknown_session", "hello?")])
@pytest.mark.parametrize("said", [True, False])
def test_what_a_device_says_of_its_numbers_when_it_comes_back(said, cut_off, away_s):
    """A hub that knows the device goes by its own record; one that forgot it must not count an update twice.

    How long the device has not heard it tells nothing: what the device said may have been lost for much longer.
    """
    device = DeviceBench().training(seq_last=5)
    if said:
        device.trained().hears(cut_off)
    else:
        device.hears(cut_off)
        device.trained()
    device.tick(device.now_s + away_s)
    claimed = 7 if said else 5
    assert device.said[0].seq_answered == claimed
    device.tick(device.now_s + 3.0)
    device.tick(device.now_s + 3.0)
    assert device.said[0].seq_answered == claimed, "nor does it welcome the device"
    device.welcome(seq_last=claimed)
    assert device.pushed == ([] if said else [6])
    assert device.told[1:] == (["warning"] if said else [])


def test_a_hub_with_an_older_state_gets_a_kept_update_under_its_next_number():
    assert recalling().welcome(seq_last=2).pushed == [3]


def test_a_hub_that_went_past_a_kept_update_never_gets_it():
    device = recalling().welcome(seq_last=9)
    assert device.told == ["joined", "warning"]
    assert device.said == [Fetch(device.session, None)]


@pytest.mark.parametrize("key", [ModelKey("f" * 32, None, "delta"), ModelKey(SPEC.fingerprint, None, "model")])
def test_a_kept_update_of_another_model_is_put_aside(key):
    device = recalling(key).welcome(seq_last=6)
    assert device.kinds == [Report, PutAside, Join, Send]
    assert device.said == [Fetch(device.session, None)]
    device.assigned(4).give(ModelInstalled(assignment(4))).trained()
    assert device.pushed == [7]


def test_a_kept_update_waits_for_the_hubs_graph():
    device = DeviceBench(recall=(KEPT, ModelKey(SPEC.fingerprint, FINGERPRINT, "delta")))
    device.welcome(seq_last=6, **OFFER)
    assert device.effects[-1] == FindGraph(FINGERPRINT)
    device.give(GraphMissing())
    assert device.said == [FetchGraph(device.session)]
    device.hears(GRAPH).give(GraphHeld(fetched=True))
    assert device.pushed == [7]
    assert device.core.work.state == "pushing"


def test_differences_from_a_model_that_went_with_the_power_are_not_taken_in():
    device = recalling().welcome(seq_last=6)
    deltas = Deltas(3, (12,), 0, "identity")
    device.hears(msgspec.structs.replace(assignment(4, Ack(7, Applied(4))), deltas=deltas))
    assert device.kinds == [Report, ResolvePush]
    answered_s = device.now_s
    assert device.until(Fetch) == Fetch(device.session, None)
    assert device.now_s == pytest.approx(answered_s + BACKOFF_MIN_S)


@pytest.mark.parametrize("seq", [6, 7])
def test_an_update_is_said_once_it_is_kept(seq):
    device = recalling().welcome(seq_last=6).give(Kept(seq))
    assert device.pushed == ([7] if seq == 7 else [])
    device.hears(Leave("stopping"))
    assert device.give(Kept(7)).effects == []


# -- an update without a loss -----------------------------------------------------------------------------------


WITHOUT_LOSS = Trained(8, 64, None, None, 0.125)


def test_an_update_without_a_loss_is_pushed_as_it_is():
    device = DeviceBench().welcome().assigned().give(ModelInstalled(assignment()))
    device.give(WITHOUT_LOSS)
    (effect,) = device.effects
    assert (effect.push.loss_mean, effect.push.loss_variance, effect.push.score) == (None, None, None)


@pytest.mark.parametrize(
    ("later", "earlier", "losses"),
    [
        ((1.0, 0.5), (None, None), (1.0, 0.5)),
        ((None, None), (3.0, 0.5), (3.0, 0.5)),
        ((None, None), (None, None), (None, None)),
        ((1.0, 0.0), (3.0, 0.0), (2.0, 1.0)),
    ],
)
def test_steps_without_a_loss_say_nothing_of_those_that_have_one(later, earlier, losses):
    whole = Trained(8, 64, *later, 0.125).after(Trained(8, 64, *earlier, 0.125))
    assert (whole.local_steps, whole.examples) == (16, 128)
    assert (whole.loss_mean, whole.loss_variance) == losses
