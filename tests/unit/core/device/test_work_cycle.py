"""A device's work: assignments, sequence numbers, retries of an update, and the training graph."""

import math

import msgspec
import pytest

from edgeasync.core.device.effects import (
    Connect,
    DeviceReport,
    FindBase,
    FindGraph,
    InstallModel,
    PrepareTraining,
    PutAside,
    ResolvePush,
    ScaleLearningRate,
    SendPush,
    SendToHub,
    TakeGraph,
    Train,
    UseModel,
)
from edgeasync.core.device.events import (
    DeviceReceived,
    GraphBroken,
    GraphForged,
    GraphHeld,
    GraphMissing,
    InstallFailed,
    Kept,
    ModelArrived,
    ModelInstalled,
    Trained,
    TransferMoved,
)
from edgeasync.core.device.hub_rotation import BACKOFF_MIN_S
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.errors import GraphError, ModelMismatchError
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Buffered,
    Deltas,
    Duplicate,
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    Refuse,
    Rejected,
)
from tests.support.parts.device_bench import (
    CHECKSUM,
    FINGERPRINT,
    GRAPH,
    KEPT,
    LEASE_S,
    OFFER,
    SPEC,
    DeviceBench,
    assignment,
    one_assignment,
)


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
    assert device.effects == [DeviceReport("answered", "buffered 2"), ResolvePush(Buffered(2))]
    device.assigned(1)
    assert device.kinds == [InstallModel]
    device.give(ModelInstalled(assignment(1))).trained()
    assert device.pushed == [2]


def test_an_assignment_that_does_not_follow_is_fetched():
    device = DeviceBench().training().trained()
    device.hears(Ack(1, Buffered(2)))
    since_s = device.now_s
    assert device.until(Fetch) == Fetch(device.session, device.core.work.held.version)
    assert device.now_s == since_s + LEASE_S


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
    assert device.effects[0] == DeviceReport("answered", words)
    device.give(ModelInstalled(assignment(4, Ack(1, outcome)))).trained()
    assert device.pushed == [2]


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
    assert device.kinds == [DeviceReport, ResolvePush, InstallModel]


BASE = {"base": "cd" * 32, "base_bytes": 5000}


def wanting(seed=0):
    """Return a device that has asked for the hub's graph."""
    return DeviceBench(seed).welcome(**OFFER).give(GraphMissing())


WORK = {
    "push": (lambda seed: DeviceBench(seed).training().trained(), SendPush),
    "fetch": (lambda seed: DeviceBench(seed).welcome(), Fetch),
    "graph": (wanting, FetchGraph),
}
"""Devices that wait for an answer, and what they say again."""


@pytest.mark.parametrize("work", ["push", "graph"])
def test_a_transfer_that_moves_is_given_time(work):
    make, kind = WORK[work]
    device = make(0)
    if work == "graph":
        device.hears(GRAPH)
    said_s = device.now_s
    for _ in range(10):
        device.give(TransferMoved(), device.now_s + 10.0)
        device.tick()
        assert not any(isinstance(said, Fetch | FetchGraph) for said in device.said)
        assert device.pushed == []
    device.until(kind)
    assert device.now_s == said_s + 100.0 + LEASE_S


@pytest.mark.parametrize(("make", "kind"), WORK.values(), ids=WORK)
def test_busy_is_tried_again_but_never_too_early(make, kind):
    pauses = []
    for seed in range(20):
        device = make(seed)
        said_s = device.now_s
        device.hears(Refuse("busy", "later", 0.5))
        assert device.effects == []
        assert isinstance(device.until(kind), kind)
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
    device.hears(Goodbye("stopping"))
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
        assert device.said == [Fetch(device.session, device.core.work.held.version)]
        device.assigned(9).give(ModelInstalled(assignment(9))).trained()
        assert device.pushed == [seq_last + 1]
    else:
        device.assigned(9, Ack(expected[0], Duplicate(Applied(4))))
        assert ResolvePush(Duplicate(Applied(4))) in device.effects


def test_an_update_that_never_left_takes_whatever_number_is_next():
    device = DeviceBench().training(seq_last=5)
    device.hears(Goodbye("stopping"))
    device.trained()
    device.until(Connect)
    assert device.welcome(seq_last=9, checksum_last=1).pushed == [10]


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
    assert device.core.work.held.version.number == 4


def test_a_model_that_comes_in_broken_is_fetched_again():
    device = DeviceBench().welcome().assigned(3)
    device.give(InstallFailed("checksum"))
    assert device.told == ["warning"]
    since_s = device.now_s
    device.until(Fetch)
    assert device.now_s == pytest.approx(since_s + 0.1)


def test_a_model_that_has_arrived_is_not_fetched_again_while_the_trainer_is_busy():
    """Loading a large model may take longer than a lease."""
    device = DeviceBench().welcome().assigned(3).give(ModelArrived(assignment(3)))
    assert device.kinds == [UseModel]
    assert device.core.work.next_deadline_s() == math.inf
    device.give(InstallFailed("checksum"))
    device.until(Fetch)
    device.assigned(3)
    assert device.core.work.next_deadline_s() == device.now_s + LEASE_S
    device.give(ModelArrived(assignment(3))).give(ModelInstalled(assignment(3)), device.now_s + 10 * LEASE_S)
    assert device.effects == [Train(8)]


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
    assert device.said == [Fetch(device.session, device.core.work.held.version)]
    device.give(ModelInstalled(assignment(3)))
    assert device.effects == []
    device.assigned(4).give(ModelInstalled(assignment(4)))
    assert device.effects == [Train(8)]


# -- the hub's graph -----------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_is_not_fetched():
    device = DeviceBench().welcome(**OFFER)
    assert device.effects == [DeviceReport("joined", "as pi-1"), FindGraph(FINGERPRINT)]
    device.give(GraphHeld(fetched=False))
    assert device.kinds == [DeviceReport, PrepareTraining, SendToHub]
    assert device.effects[0] == DeviceReport("graph", "from the cache, 1000 bytes")
    assert device.said == [Fetch(device.session, device.core.work.held.version)]


def test_a_graph_that_is_missing_is_fetched_before_anything_else():
    device = DeviceBench().welcome(**OFFER).give(GraphMissing())
    assert device.effects == [SendToHub(FetchGraph(device.session))]
    assert device.assigned(1).ignored == ["Assignment while fetching_graph"]
    device.hears(GRAPH)
    assert device.effects == [TakeGraph(GRAPH)]
    device.give(GraphHeld(fetched=True))
    assert device.effects[0] == DeviceReport("graph", "fetched, 1000 bytes")
    assert device.kinds == [DeviceReport, PrepareTraining, SendToHub]
    device.assigned(1).give(ModelInstalled(assignment(1))).trained()
    assert device.pushed == [1]


def test_a_graph_that_does_not_come_is_asked_for_again():
    device = wanting()
    since_s = device.now_s
    assert device.until(FetchGraph) == FetchGraph(device.session)
    assert device.now_s == since_s + LEASE_S


def test_a_graph_that_comes_in_broken_is_asked_for_again():
    device = wanting().hears(GRAPH).give(GraphBroken("checksum"))
    since_s = device.now_s
    assert device.told == ["warning"]
    device.until(FetchGraph)
    assert 1.5 <= device.now_s - since_s <= 3.0
    device.hears(GRAPH).give(GraphHeld(fetched=True))
    assert device.said == [Fetch(device.session, device.core.work.held.version)]


@pytest.mark.parametrize("base", [False, True], ids=["graph", "base"])
def test_what_cannot_be_stored_is_reported_once_and_tried_less_and_less_often(base):
    """The disk may be full for days. Each reason is news, and success ends the series."""
    device = DeviceBench().welcome(**OFFER | (BASE if base else {}))
    device.give(GraphHeld(fetched=True) if base else GraphMissing())

    def waited_s(reason):
        since_s, told = device.now_s, device.give(GraphBroken(reason)).told
        seen = device.until(FindBase if base else FetchGraph)
        assert seen is not None
        return device.now_s - since_s, told

    waits = [
        waited_s(reason) for reason in ("disk full", "disk full", "no access", "disk full", *["no access"] * 4)
    ]
    assert [told for _, told in waits] == [["warning"], [], ["warning"], *[[]] * 5]
    for count, (wait_s, _) in enumerate(waits):
        assert 0.5 <= wait_s / min(60.0, 3.0 * 2**count) <= 1.0
    device.give(GraphHeld(fetched=True))
    assert device.told == ["base" if base else "graph"]


@pytest.mark.parametrize("way", ["asked", "coming in"])
def test_a_graph_survives_an_offline_spell(way):
    device = wanting()
    if way == "coming in":
        device.hears(GRAPH)
    device.hears(Goodbye("stopping"))
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.effects[-1] == FindGraph(FINGERPRINT)
    device.give(GraphMissing())
    assert device.said == [FetchGraph(device.session)]
    device.hears(GRAPH).give(GraphHeld(fetched=True))
    assert PrepareTraining in device.kinds


def test_a_graph_that_is_kept_while_the_link_is_down_is_there_at_the_next_welcome():
    device = wanting().hears(GRAPH).hears(Goodbye("stopping"))
    device.give(GraphHeld(fetched=True))
    assert device.kinds == [DeviceReport]
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.kinds == [DeviceReport, PrepareTraining, SendToHub]
    assert device.said == [Fetch(device.session, device.core.work.held.version)]


def test_a_graph_that_is_held_is_not_asked_for_after_a_reconnect():
    device = DeviceBench().welcome(**OFFER).give(GraphHeld(fetched=False)).assigned(1)
    device.give(ModelInstalled(assignment(1))).trained().hears(Goodbye("stopping"))
    device.until(Connect)
    device.welcome(**OFFER)
    assert device.pushed == [1]
    assert device.kinds == [DeviceReport, SendPush]


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
        DeviceReceived(msgspec.structs.replace(GRAPH, fingerprint="cd" * 32)),
        DeviceReceived(msgspec.structs.replace(GRAPH, payload_bytes=999)),
    ],
)
def test_a_graph_that_is_not_the_one_announced_ends_the_device(event):
    (finish,) = wanting().give(event).effects
    assert type(finish.error) is GraphError


@pytest.mark.parametrize("graph", [None, "cd" * 32])
def test_another_graph_at_the_same_address_is_another_model(graph):
    device = DeviceBench().welcome(**OFFER).give(GraphHeld(fetched=False)).hears(Goodbye("stopping"))
    device.until(Connect)
    device.welcome(**{**OFFER, "graph": graph})
    (finish,) = device.effects
    assert isinstance(finish.error, ModelMismatchError)


# -- after a power cut ---------------------------------------------------------------------------------------

KEY = ModelKey(SPEC.fingerprint, None, "delta")


def recalling(key=KEY):
    """A device that was started again with an update that may have been answered."""
    return DeviceBench(recall=(KEPT, key))


def test_a_kept_update_is_repeated_under_its_number():
    device = recalling()
    assert device.effects[1].message.seq_answered == 8, "it may have been answered"
    device.welcome(seq_last=6)
    assert device.kinds == [DeviceReport, PrepareTraining, SendPush]
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
    assert device.kinds == [DeviceReport, ResolvePush, InstallModel]
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
@pytest.mark.parametrize("cut_off", [Goodbye("stopping"), Refuse("unknown_session", "hello?")])
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
    assert device.kinds == [DeviceReport, PutAside, PrepareTraining, SendToHub]
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
    assert device.kinds == [DeviceReport, ResolvePush]
    answered_s = device.now_s
    assert device.until(Fetch) == Fetch(device.session, None)
    assert device.now_s == pytest.approx(answered_s + BACKOFF_MIN_S)


@pytest.mark.parametrize("seq", [6, 7])
def test_an_update_is_said_once_it_is_kept(seq):
    device = recalling().welcome(seq_last=6).give(Kept(seq))
    assert device.pushed == ([7] if seq == 7 else [])
    device.hears(Goodbye("stopping"))
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
