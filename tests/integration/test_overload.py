"""More than a hub can serve: no file descriptors left, and devices that ask and never listen."""

import resource
import shutil
import sys
import time

import psutil
import pytest
import zmq

from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSION, Fetch, Hello, StatusRequest, Welcome
from tests.support.kills import Fleet
from tests.support.processes import PATIENCE_S, trained, until

pytestmark = pytest.mark.process

COSTS_BYTES_MAX = 128 << 20
"""What eight members that read nothing may cost a hub whose model has 0.7 MB."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_without_file_descriptors_newcomers_wait_and_the_others_go_on(commands):
    fleet = Fleet(commands, processes=8, start=False, checkpoint='[checkpoint]\nevery = "20 updates"\n')
    fleet.start_hub()
    early, late = range(3), range(3, 8)
    for number in early:
        fleet.start_agents(number)
    stories = [fleet.devices_of(number)[0] for number in early]
    fleet.wait_for_answers(3, since_s=0.0, stories=stories)
    hub = psutil.Process(fleet.hub.pid)
    files_max = hub.num_fds() + 2
    usual, hard = resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE, (files_max, hard))
    for number in late:
        fleet.start_agents(number)
    waiting = [fleet.devices_of(number)[0] for number in late]

    def joined():
        fleet.stories.read()
        return [story for story in waiting if story.joined_s]

    for number in late:
        fleet.agents[number].wait_for("started")
    until(lambda: hub.num_fds() == files_max, "a hub without a descriptor to spare")
    for _ in range(3):
        fleet.wait_for_answers(20, stories=stories)
    assert len(joined()) <= 2
    assert not any(story.told_of("disconnected") for story in stories)

    # When the others end, their places are taken.
    for number in early:
        fleet.agents[number].kill()
    until(lambda: len(joined()) >= 3, "the next devices")
    resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE, (usual, hard))
    fleet.wait_for_answers(3, stories=waiting)
    fleet.stop()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is missing")
def test_a_hub_takes_as_many_descriptors_as_it_may(commands):
    hub, _ = commands.hub(commands.settings(), under=("prlimit", "--nofile=256:4096"))
    assert resource.prlimit(hub.pid, resource.RLIMIT_NOFILE) == (4096, 4096)


class Glutton:
    """A member that asks for models as fast as it can, and reads none."""

    def __init__(self, address, name):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 1)
        self._socket.connect(address)
        self._socket.send(wire.encode(Hello((PROTOCOL_VERSION,), name, name.encode().ljust(16, b"."), 1)))
        assert self._socket.poll(1000 * PATIENCE_S)
        welcome = wire.decode(self._socket.recv())
        assert isinstance(welcome, Welcome)
        self._asking = [wire.encode(Fetch(welcome.session)), wire.encode(StatusRequest())]
        self.asked = 0

    def ask(self, count):
        """Ask so often, or until nothing more is taken."""
        for turn in range(count):
            try:
                self._socket.send(self._asking[turn % 2], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.asked += 1

    def close(self):
        """End the connection."""
        self._context.destroy(0)


def test_devices_that_ask_and_never_read_cost_bounded_memory(commands):
    model = 'kind = "mlp"\ninputs = 400\nhidden = [400]\nclasses = 10'
    more = '[liveness]\nheartbeat_s = 0.5\nlease_s = 5.0\n[policy]\naggregate = { kind = "immediate" }\n'
    hub, address = commands.hub(commands.settings(model=model, more=more))
    data = commands.data("examples.npz", inputs=400, classes=10)
    for name in ("first", "second"):
        commands.agent(address, name, data=data, step_s=0.01)
    before = trained(address, 10)
    resident = psutil.Process(hub.pid).memory_info
    usual = resident().rss
    gluttons = [Glutton(address, f"glutton-{number}") for number in range(8)]
    try:
        end_s, most = time.monotonic() + 3.0, 0
        while time.monotonic() < end_s:
            for glutton in gluttons:
                glutton.ask(200)
            most = max(most, resident().rss)
            time.sleep(0.005)
        for name in ("first", "second"):
            after = trained(address, 5, name)
    finally:
        for glutton in gluttons:
            glutton.close()
    assert sum(glutton.asked for glutton in gluttons) > 1000
    assert after["version"] > before["version"]
    assert most - usual < COSTS_BYTES_MAX
