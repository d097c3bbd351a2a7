"""The feed: only changes are described, everything is durable before it is sent, and nobody pays for nothing."""

import msgspec

from edgeasync.core.engine.feed import CHANGES_MAX, IDLE_S, KEPT_UPDATES, SLICE, Feed
from edgeasync.core.hub.effects import HubReport
from edgeasync.protocol import wire
from edgeasync.protocol.feed import DeviceDetails, FeedUpdate
from edgeasync.protocol.messages import Goodbye, Order, Ping
from tests.support.parts.engine_bench import HeldLog
from tests.support.parts.garbage import no_garbage
from tests.support.parts.statuses import DAEMON
from tests.support.parts.turns import Bench


class Source:
    """The feed's shell: a clock that the test sets, and timers that it lets expire."""

    def __init__(self):
        self.time_s = 0.0
        self.wall_ahead_s = 1e9
        self.timers = []
        self.unseen = []

    def after(self, delay_s, action):
        self.timers.append((self.time_s + delay_s, action))

    def describe(self):
        return DAEMON | {"enrolled_unseen": self.unseen}

    def now_s(self):
        return self.time_s

    def wall_s(self):
        return self.wall_ahead_s + self.time_s

    def pending_keys(self):
        return None

    def run(self, until_s):
        """Let timers expire in order up to a time; return how often each time had an action."""
        while due := [one for one in self.timers if one[0] <= until_s]:
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.time_s = max(self.time_s, first[0])
            first[1]()
        self.time_s = until_s


class Fleet:
    """Devices, their hub and its feed."""

    def __init__(self, devices, **options):
        self.bench = Bench(devices, **options)
        self.source = Source()
        self.feed = Feed(self.bench.engine, self.source)
        self.told = []
        self.described = []
        describe = self.core.describe_devices

        def counted(members, *arguments):
            members = list(members)
            self.described.append(len(members))
            return describe(members, *arguments)

        self.core.describe_devices = counted

    @property
    def core(self):
        return self.bench.engine.core

    def whole(self):
        self.feed.whole(self.told.append)
        self.source.run(self.source.time_s)
        return self.read()

    def after(self, number, wait_s=1.0):
        self.feed.after(number, self.told.append)
        self.source.run(self.source.time_s + wait_s)
        return self.read()

    def read(self):
        return [msgspec.json.decode(line, type=FeedUpdate) for line in self.told[-1].split(b"\n")][-1]

    def ping(self, number, steps=1):
        peer = self.bench.peers[number]
        now_s = self.source.time_s
        self.bench.say(peer, Ping(self.bench.sessions[peer], 0.0, steps), at_s=now_s)
        return f"device-{peer.hex()}"


def test_a_viewer_receives_everything_and_then_what_has_changed():
    fleet = Fleet(5)
    first = fleet.whole()
    assert (first.number, first.previous, len(first.devices)) == (1, 0, 5)
    assert first.columns[0] == "id"
    assert first.counts == {"joining": 5}
    assert first.summary.pid == DAEMON["pid"]
    assert (first.devices[0].address, first.devices[0].last_seen) == ("10.0.0.0", 10**9)
    fleet.described.clear()
    fleet.source.time_s = 0.5
    name = fleet.ping(3)
    second = fleet.after(1)
    assert (second.number, second.previous) == (2, 1)
    assert [row.id for row in second.devices] == [name]
    assert second.counts == {"joining": 4, "training": 1}
    assert sum(fleet.described) == 1, "only the changed device was described"
    third = fleet.after(2)
    assert (third.previous, third.devices, third.columns) == (2, [], [])


def test_updates_are_freed_at_once():
    """Each first one describes the whole fleet, and the garbage collector runs rarely."""
    fleet = Fleet(2 * SLICE + 1)
    with no_garbage():
        for _ in range(2):
            number = fleet.whole()
            fleet.ping(0)
            number = fleet.after(number.number)
            fleet.source.run(fleet.source.time_s + IDLE_S + 2.0)
        assert (number.previous, len(number.devices), fleet.feed.active) == (number.number - 1, 1, False)


def test_all_viewers_of_an_update_share_its_bytes():
    fleet = Fleet(3)
    for _ in range(3):
        fleet.feed.whole(fleet.told.append)
    fleet.source.run(0.0)
    fleet.feed.whole(fleet.told.append)
    assert len({id(text) for text in fleet.told}) == 1
    fleet.told.clear()
    for _ in range(3):
        fleet.feed.after(1, fleet.told.append)
    fleet.source.run(1.0)
    assert len(fleet.told) == 3
    assert len({id(text) for text in fleet.told}) == 1


def test_a_late_viewer_receives_the_missed_updates_and_a_very_late_one_everything():
    fleet = Fleet(2)
    fleet.whole()
    for number in range(1, KEPT_UPDATES + 2):
        fleet.after(number)
    newest = fleet.feed.number
    fleet.feed.after(newest - 3, fleet.told.append)
    updates = [msgspec.json.decode(line, type=FeedUpdate) for line in fleet.told[-1].split(b"\n")]
    assert [(one.previous, one.number) for one in updates] == [
        (newest - 3, newest - 2), (newest - 2, newest - 1), (newest - 1, newest),
    ]  # fmt: skip
    for strange in (newest - KEPT_UPDATES - 1, newest + 5, -7):
        fleet.feed.after(strange, fleet.told.append)
        assert fleet.read().previous == 0


def test_nothing_is_recorded_while_nobody_waits():
    fleet = Fleet(2)
    assert fleet.core.members.changes is None
    assert fleet.source.timers == []
    fleet.whole()
    fleet.source.run(IDLE_S + 1.0)
    assert fleet.core.members.changes is None
    assert fleet.source.timers == []
    fleet.ping(0)
    assert fleet.whole().counts == {"joining": 1, "training": 1}


def test_a_closed_feed_describes_nothing_more():
    fleet = Fleet(3 * SLICE)
    fleet.feed.whole(fleet.told.append)
    fleet.feed.close()
    fleet.described.clear()
    fleet.source.run(10.0)
    assert (fleet.told, fleet.described, fleet.core.members.changes) == ([], [], None)


def test_a_change_of_state_comes_before_older_changes_in_a_large_fleet():
    fleet = Fleet(CHANGES_MAX + 20)
    fleet.whole()
    assert max(fleet.described) <= SLICE, "described in slices"
    for number in range(CHANGES_MAX + 10):
        fleet.ping(number, steps=0)
    name = fleet.ping(CHANGES_MAX + 15)
    fleet.source.time_s = 0.9
    fleet.bench.engine.tick(0.9)
    second = fleet.after(1)
    assert second.devices[0].id == name
    fleet.ping(0, steps=0)
    rest = fleet.after(2)
    assert len(second.devices) + len(rest.devices) <= CHANGES_MAX + 11
    assert len(fleet.core.members.changes) == 0


def test_a_fold_and_a_departure_change_the_rows():
    fleet = Fleet(4)
    fleet.whole()
    *others, last = fleet.bench.peers
    fleet.bench.push(others)
    assert [(row.state, row.updates_applied) for row in fleet.after(1).devices] == 3 * [("training", 0)]
    fleet.bench.push([last])
    rows = {row.id: row.updates_applied for row in fleet.after(2).devices}
    assert rows == {f"device-{peer.hex()}": 1 for peer in fleet.bench.peers}
    fleet.bench.say(last, Goodbye("stopping", fleet.bench.sessions[last]), at_s=3.0)
    (left,) = fleet.after(3).devices
    assert (left.state, left.last_error) == ("left", "its agent was stopped")


def test_an_update_that_is_dropped_later_changes_its_devices_row():
    fleet = Fleet(2)
    fleet.bench.push(fleet.bench.peers[:1])
    fleet.whole()
    fleet.core.policy_engine.drop_updates(f"device-{fleet.bench.peers[0].hex()}", "rolled_back")
    assert [row.updates_rejected for row in fleet.after(1).devices] == [1]


def test_a_forgotten_device_is_gone():
    fleet = Fleet(2)
    fleet.whole()
    peer = fleet.bench.peers[0]
    fleet.bench.say(peer, Goodbye("stopping", fleet.bench.sessions[peer]), at_s=0.5)
    member = fleet.core.members.by_peer(peer)
    fleet.core.members.forget(member)
    update = fleet.after(1)
    assert update.gone == [member.device_id]
    assert update.counts == {"joining": 1}
    assert [row.id for row in fleet.whole().devices] == [f"device-{fleet.bench.peers[1].hex()}"]


def test_events_are_sent_once():
    fleet = Fleet(1)
    events = fleet.bench.engine.status_answers.events
    for number in range(300):
        events.note(HubReport("lost", "pi", f"{number}"), 5.0)
    first = fleet.whole()
    assert [event.number for event in first.events] == list(range(101, 301))
    events.note(HubReport("joined", "pi"), 6.0)
    assert [event.number for event in fleet.whole().events][-1] == 300, "the next update has the newer one"
    assert [event.event for event in fleet.after(1).events] == ["joined"]


def test_evaluations_do_not_displace_other_events():
    fleet = Fleet(1)
    events = fleet.bench.engine.status_answers.events
    events.note(HubReport("lost", "pi"), 5.0)
    for number in range(300):
        events.note(HubReport("evaluated", "", f"version {number}"), 6.0)
    assert [event.event for event in fleet.whole().events] == ["lost"]
    events.note(HubReport("evaluated"), 7.0)
    events.note(HubReport("joined", "pi"), 7.0)
    assert [event.event for event in fleet.after(1).events] == ["joined"]


def test_devices_that_never_came_need_attention():
    fleet = Fleet(1)
    fleet.source.unseen = ["pi-7"]
    first = fleet.whole()
    assert [(one.device, one.reason) for one in first.attention] == [("pi-7", "never_came")]
    assert first.attention_count == 1
    fleet.core.admission.note_refused("pi-7", "another model", 0.0)
    update = fleet.after(1)
    assert [(one.device, one.words) for one in update.attention] == [("pi-7", "refused: another model")]
    fleet.feed.device("pi-7", fleet.told.append)
    assert msgspec.json.decode(fleet.told[-1], type=DeviceDetails).attention.reason == "refused"
    fleet.core.admission._refused.clear()
    fleet.source.unseen = [f"pi-{number}" for number in range(1, 250)]
    update = fleet.after(2)
    assert (len(update.attention), len(update.summary.enrolled_unseen), update.attention_count) == (100, 100, 249)
    assert len(fleet.feed.totals().summary.enrolled_unseen) == 249
    fleet.feed.device("pi-7", fleet.told.append)
    details = msgspec.json.decode(fleet.told[-1], type=DeviceDetails)
    assert (details.device, details.attention.reason) == (None, "never_came")


def test_the_details_of_a_device_contain_its_own_events():
    fleet = Fleet(2)
    name = f"device-{fleet.bench.peers[0].hex()}"
    for device in (name, "another"):
        fleet.bench.engine.status_answers.events.note(HubReport("lost", device), 5.0)
    fleet.feed.device(name, fleet.told.append)
    details = msgspec.json.decode(fleet.told[-1], type=DeviceDetails)
    assert (details.device.id, details.attention, len(details.events)) == (name, None, 1)
    fleet.feed.device("nobody", fleet.told.append)
    assert fleet.told[-1] == b""


def test_all_devices_are_described_again_when_the_clock_is_set():
    fleet = Fleet(2)
    fleet.whole()
    fleet.source.wall_ahead_s += 3600.0
    update = fleet.after(1, wait_s=2.0)
    assert update.previous == 0
    assert {row.last_seen for row in update.devices} == {10**9 + 3600}


class Halting(Fleet):
    """A fleet whose log the test lets become durable."""

    def __init__(self):
        super().__init__(2)
        self.log = HeldLog()
        self.bench.engine.outbox._log = self.log


def test_nothing_is_shown_before_it_is_durable():
    fleet = Halting()
    fleet.log.entries.append(b"")
    fleet.feed.whole(fleet.told.append)
    fleet.source.run(3.0)
    assert fleet.told == []
    fleet.log.move()
    fleet.bench.engine.outbox.release()
    fleet.source.run(3.0)
    assert fleet.read().number == 1


def test_while_the_hub_cannot_write_viewers_see_why_and_the_last_durable_state():
    fleet = Halting()
    engine = fleet.bench.engine
    engine.status_answers.shown = msgspec.json.encode(engine.core.status(0.0) | DAEMON)
    fleet.log.entries.append(b"")
    fleet.feed.whole(fleet.told.append)
    fleet.source.run(0.5)
    engine.halted = True
    engine.status_answers.events.note(HubReport("not_writing", detail="disk full"), 5.0)
    fleet.source.run(1.0)
    first = fleet.read()
    assert (len(first.devices), first.events[-1].event) == (2, "not_writing")
    second = fleet.after(first.number)
    assert (second.devices, second.previous) == ([], first.number)
    engine.halted = False
    fleet.log.move()
    engine.outbox.release()
    fleet.source.run(fleet.source.time_s)
    fleet.ping(0)
    number = fleet.feed.number
    assert [row.state for row in fleet.after(number).devices] == ["training"]


def test_totals_need_no_viewer_and_are_at_most_a_second_old():
    fleet = Fleet(3)
    totals = fleet.feed.totals()
    assert (totals.counts, totals.summary.version) == ({"joining": 3}, 0)
    fleet.bench.push_all()
    assert fleet.feed.totals() is totals
    fleet.source.time_s = 1.0
    assert fleet.feed.totals().counts == {"training": 3}
    assert fleet.feed.totals().summary.updates_applied == 3
    fleet.whole()
    fleet.source.time_s = 5.0
    assert fleet.feed.totals().counts == {"training": 3}


def test_an_order_of_an_operator_changes_the_row():
    fleet = Fleet(2)
    fleet.whole()
    name = f"device-{fleet.bench.peers[0].hex()}"
    fleet.bench.engine.on_message(b"operator", wire.encode(Order(name, "quarantine")), None, 0.5)
    update = fleet.after(1)
    assert [row.state for row in update.devices] == ["quarantined"]
    assert [(one.device, one.reason) for one in update.attention] == [(name, "quarantined")]


def test_the_words_of_attention_are_current():
    fleet = Fleet(3)
    fleet.bench.engine.on_message(b"operator", wire.encode(Order("device-000000", "quarantine")), None, 0.5)
    fleet.whole()
    fleet.source.time_s = 20.0
    fleet.bench.engine.tick(20.0)
    update = fleet.after(1)
    assert [one.reason for one in update.attention] == ["lost", "lost", "quarantined"]
    later = fleet.after(2, wait_s=300.0)
    assert later.attention[0].words != update.attention[0].words
