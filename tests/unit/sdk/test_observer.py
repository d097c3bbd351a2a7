"""What the core decides is told once, however often a device says the same."""

from types import SimpleNamespace

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.sdk import events
from edgeasync.sdk.observer import Observer, event_of
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.trainer import StepResult

MODEL = SoftmaxModel(inputs=3, classes=2)


class Nudging:
    """A trainer that moves the model a little."""

    spec = MODEL.spec

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += 0.01
        return StepResult(1.0, 1)


def test_an_update_that_is_sent_twice_is_told_once():
    clock, seen = VirtualClock(), []
    hub = SimulatedHub(
        clock, spec=MODEL.spec, initial=MODEL.initial(0), policy=Policy(), settings=HubCoreSettings(), seed=1
    )
    observer = Observer(None, 0, seen.append)
    observer.watch(SimpleNamespace(core=hub.core, show=lambda action: action()), None)
    hub.engine._observe = observer
    receive = hub.receive

    def twice(peer, header, payload):
        receive(peer, header, payload)
        if isinstance(wire.decode(header), Push):
            receive(peer, header, payload)

    hub.receive = twice
    SimulatedDevice(clock, hub, "device", Nudging(), step_s=0.01, link=LinkProfile(1e6, 1e6, 0.01)).start()
    clock.run(lambda: hub.core.updates_applied >= 10, 60.0)
    assert hub.core.duplicates > 0
    told = [event.number for event in seen if isinstance(event, events.Update)]
    assert told == list(range(1, len(told) + 1))


def test_an_operators_order_is_an_alert_and_no_departure():
    """The device stays and trains on. Red before: a `LeaveEvent`, and nothing about its release."""
    for name in ("excluded", "released"):
        assert isinstance(event_of(name, "pi", "by an order", 1.0, {}), events.Alert)
    assert isinstance(event_of("quarantined", "pi", "by an order", 1.0, {}), events.Leave)
