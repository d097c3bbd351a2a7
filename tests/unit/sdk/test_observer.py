"""What the core decides is told once, however often a device says the same."""

from types import SimpleNamespace

import numpy as np

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.sdk import events
from edgeasync.sdk.observer import Observer, event_of
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile

MODEL = SoftmaxModel(inputs=3, classes=2)


class Nudging:
    """A trainer that moves the model a little."""

    spec = MODEL.spec

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += 0.01
        return StepResult(1.0, 1)


def watched(tell):
    """Return a clock, a hub, and an observer of it."""
    clock = VirtualClock()
    hub = SimulatedHub(
        clock, spec=MODEL.spec, initial=MODEL.initial(0), policy=Policy(), settings=HubCoreSettings(), seed=1
    )
    hub.start()
    observer = Observer(None, 0, tell)
    observer.watch(SimpleNamespace(core=hub.core, show=lambda action: action()), None)
    hub.engine._observe = observer
    return clock, hub, observer


def test_an_update_that_is_sent_twice_is_told_once():
    seen = []
    clock, hub, _ = watched(seen.append)
    receive = hub.receive

    def twice(peer, header, payload):
        receive(peer, header, payload)
        if isinstance(wire.decode(header), Push):
            receive(peer, header, payload)

    hub.receive = twice
    SimulatedDevice(hub, "device", Nudging(), step_s=0.01, link=LinkProfile(1e6, 1e6, 0.01)).start()
    clock.run(lambda: hub.core.updates_applied >= 10, 60.0)
    assert hub.core.duplicates > 0
    told = [event.number for event in seen if isinstance(event, events.Update)]
    assert told == list(range(1, len(told) + 1))


def test_an_operators_order_is_an_alert_and_no_departure():
    """The device stays and trains on. Red before: a `LeaveEvent`, and nothing about its release."""
    for name in ("excluded", "released"):
        assert isinstance(event_of(name, "pi", "by an order", 1.0, {}), events.Alert)
    assert isinstance(event_of("quarantined", "pi", "by an order", 1.0, {}), events.Leave)


class Broken(Nudging):
    """A trainer that has diverged."""

    def step(self):
        self._parameters += np.nan
        return StepResult(1.0, 1)


def test_a_run_has_diverged_once_the_last_device_that_did_well_has_left():
    """Red before: that was asked only when a device diverged, so such a run never ended."""
    clock, hub, observer = watched([].append)
    link = LinkProfile(1e6, 1e6, 0.01)
    SimulatedDevice(hub, "broken", Broken(), step_s=0.01, link=link).start()
    well = SimulatedDevice(hub, "well", Nudging(), step_s=0.01, link=link)
    well.start()
    clock.run(lambda: False, 20.0)
    assert not any("diverged" in event.detail for event in observer.noted if isinstance(event, events.Alert))
    well.cut_power()
    clock.run(lambda: False, 90.0)
    (told,) = [event for event in observer.noted if isinstance(event, events.Alert) and not event.device]
    assert told.detail.startswith("diverged: ")
