"""Members that ask for models as fast as they can and read nothing, beside two agents that train."""

import time

import zmq

from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Hello, Ping, Pong, StatusRequest, Welcome
from tests.support.programs.processes import PATIENCE_S

TRAINERS = ("first", "second")
MODEL = 'kind = "mlp"\ninputs = 400\nhidden = [400]\nclasses = 10'
MODEL_BYTES = 4 * (400 * 400 + 400 + 400 * 10 + 10)
MORE = '[liveness]\nheartbeat_s = 0.5\nlease_s = 120.0\n[policy]\naggregate = { kind = "immediate" }\n'
ANSWER_S = 1.0
BUFFER_BYTES = 4096
"""So that the connection holds little, and the hub has to keep or drop the rest."""


def start_training(commands):
    """Start a hub whose model has 0.7 MB, and two agents; return the hub and its address."""
    hub, address = commands.hub(commands.settings(model=MODEL, more=MORE))
    data = commands.data("examples.npz", inputs=400, classes=10)
    for name in TRAINERS:
        commands.agent(address, name, data=data, step_s=0.01)
    return hub, address


class Glutton:
    """A member that asks for models as fast as it can, and reads none before it is told to."""

    def __init__(self, address, name):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 1)
        self._socket.set(zmq.RCVBUF, BUFFER_BYTES)
        self._socket.connect(address)
        self._socket.send(wire.encode(Hello(name, name.encode().ljust(16, b"."), 1)))
        assert self._socket.poll(1000 * PATIENCE_S)
        welcome = wire.decode(self._socket.recv())
        assert isinstance(welcome, Welcome)
        self._asking = [wire.encode(Fetch(welcome.session)), wire.encode(StatusRequest())]
        self._ping = wire.encode(Ping(welcome.session, 0.0, 0))
        self.asked = 0

    def ask(self, count):
        """Ask `count` times, or until the connection accepts nothing more."""
        for turn in range(count):
            try:
                self._socket.send(self._asking[turn % 2], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.asked += 1

    def read_all(self):
        """Read what the hub kept; return how many bytes that was.

        A connection keeps its order: whatever is not here before a pong was dropped. A pong may be dropped too, so
        another ping follows.
        """
        nbytes, deadline_s = 0, time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self._socket.send(self._ping)
            while self._socket.poll(1000 * ANSWER_S):
                frames = self._socket.recv_multipart()
                if isinstance(wire.decode(frames[0]), Pong):
                    return nbytes
                nbytes += sum(map(len, frames))
        raise AssertionError("the hub does not answer")

    def close(self):
        """End the connection."""
        self._context.destroy(0)
