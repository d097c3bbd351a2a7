"""Operators' orders in the engine: whose they are, when they are confirmed, and what a bad disk does to them."""

import msgspec
import pytest

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.divergence import PastAlarm
from edgeasync.core.recovery.log import event_of, read_entry
from edgeasync.core.recovery.state import dump_state, load_state, succeed
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Hello, Order, Refuse, Status, StatusRequest
from tests.support.parts import engine_bench
from tests.support.parts.engine_bench import HeldLog
from tests.support.parts.hub_bench import HubBench

SPEC = ParameterSpec((Parameter("w", (3,)),))
OPERATOR = Sender(b"o" * 32, "admin", "operator")
DEVICE = Sender(b"p" * 32, "pi", "device")


class Bench(engine_bench.Bench):
    """An engine with a device `pi` under a key, and what was sent to whom."""

    def __init__(self, policy=None, sender=DEVICE):
        self.log = HeldLog()
        super().__init__(policy=policy or Policy(), spec=SPEC, log=self.log)
        self.core = self.engine.core
        self.say(Hello("pi", b"p" * 16, 1), sender)
        self.write()

    @property
    def sent(self):
        return [(message, payload) for (_, message), payload in zip(*self.noted, strict=True)]

    @property
    def noted(self):
        return self.notes.sent, self.notes.payloads

    def forget(self):
        for noted in self.noted:
            noted.clear()

    def say(self, message, sender=OPERATOR, at_s=0.0):
        """Say something; return what is sent at once."""
        self.forget()
        self.engine.on_message(sender.name.encode() or b"x", wire.encode(message), None, at_s, sender)
        return [message for message, _ in self.sent]

    def write(self):
        """Let all be durable; return what was sent then."""
        self.forget()
        self.log.move()
        self.engine.on_durable(0.0)
        return [message for message, _ in self.sent]

    @property
    def orders(self):
        return [order.device_id for order in self.core.policy_engine.state.divergence.orders.values()]


@pytest.mark.parametrize("order", ["quarantine", "release"])
@pytest.mark.parametrize(("sender", "done"), [(OPERATOR, True), (DEVICE, False)])
def test_orders_are_for_operators_alone(sender, done, order):
    bench = Bench()
    if order == "release":
        bench.say(Order("pi", "quarantine"))
    answers = bench.say(Order("pi", order), sender)
    assert (bench.orders == ["pi"]) == ((order == "quarantine") == done)
    if not done:
        assert answers == [Refuse("not_allowed", "the key of pi belongs to a device; only operators may do this")]


def test_an_order_is_confirmed_once_it_is_durable_and_the_journal_leads_there():
    bench = Bench()
    assert bench.say(Order("pi", "quarantine")) == []
    assert bench.orders == ["pi"]
    assert bench.write() == [Status()]
    (_, status) = bench.sent[0]
    assert msgspec.json.decode(status)["devices"][0]["state"] == "quarantined"
    event = event_of(read_entry(bench.log.entries[-1]))
    assert (event.message, event.key) == (Order("pi", "quarantine"), OPERATOR.key)


def test_an_order_that_waits_for_a_disk_that_fails_is_not_confirmed():
    """An older status would look like success. The operator is told to try again, which is harmless."""
    bench = Bench()
    bench.say(StatusRequest())
    bench.say(Order("pi", "quarantine"))
    bench.forget()
    bench.engine.on_failing("No space left on device")
    answers = [message for message, _ in bench.sent]
    assert [getattr(answer, "code", "status") for answer in answers] == ["busy"]
    (refuse,) = bench.say(Order("pi", "quarantine"))
    assert (refuse.code, refuse.sentence) == ("busy", "the hub cannot write to its disk; try again later")
    assert bench.write() == []
    assert bench.say(Order("pi", "quarantine")) + bench.write() == [Status()]
    assert bench.orders == ["pi"]


def test_orders_of_one_operator_are_bounded_as_its_requests_are():
    bench = Bench()
    answers = [len(bench.say(Order("pi", "quarantine")) + bench.write()) for _ in range(300)]
    assert 0 < sum(answers) < 300
    assert bench.orders == ["pi"]


def test_a_device_sees_alarms_that_are_over_of_its_own_devices_only():
    bench = Bench()
    past = bench.core.policy_engine.state.divergence.past
    past += [PastAlarm(name, "odd", 0.0, 1.0) for name in ("", "pi", "pi/3", "other")]
    seen = []
    for sender in (OPERATOR, DEVICE):
        bench.say(StatusRequest(), sender, at_s=5.0)
        (payload,) = [payload for message, payload in bench.sent if isinstance(message, Status)]
        seen.append([alarm["device"] for alarm in msgspec.json.decode(payload)["alarms_past"]])
    assert seen == [["", "pi", "pi/3", "other"], ["", "pi", "pi/3"]]


@pytest.mark.parametrize("policies_stay", [True, False])
def test_an_order_survives_a_restart_under_any_settings(policies_stay):
    hub, again = HubBench(), HubBench()
    hub.join("a")
    hub.order("a")
    if policies_stay:
        load_state(again.core, dump_state(hub.core))
    else:
        succeed(again.core, hub.core)
    assert list(again.core.policy_engine.state.divergence.orders) == ["a"]
    assert again.core.status(0.0)["devices"][0]["state"] == "quarantined"
