"""Sockets under keys, as a hub's friends and enemies use them, and a hub with keys."""

import contextlib
import socket
import threading

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgeasync.durable.keys import KeyPair
from edgeasync.net.curve import use_keys
from edgeasync.net.status import fetch_status
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Fetch, Hello, Piece, Push, Welcome
from tests.support.programs.processes import PATIENCE_S, until

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
PATIENCE_MS = int(1000 * PATIENCE_S)


class Client:
    """A DEALER of its own context that speaks under a key, or without one."""

    def __init__(self, address, pair=None, hub=None, routing_id=None, events=FAILURES):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        if routing_id is not None:
            self.socket.set(zmq.ROUTING_ID, routing_id)
        if pair is not None:
            use_keys(self.socket, pair, hub)
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(address)

    def say(self, message, *payload):
        self.socket.send_multipart([wire.encode(message), *payload])

    def hear(self):
        """Return the next message from the hub."""
        assert self.socket.poll(PATIENCE_MS), "no answer"
        return wire.decode(self.socket.recv_multipart()[0])

    def let_in(self):
        """Wait until the hub has let the connection in; it must be among the `events` that are watched."""
        assert self.failure() == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def failure(self):
        """Wait until the connection fails; return the event, and keep its `code`."""
        assert self.monitor.poll(PATIENCE_MS), "no failure"
        message = parse_monitor_message(self.monitor.recv_multipart())
        self.code = message["value"]
        return message["event"]

    def ended(self):
        """Wait until the connection is closed by the hub."""
        while self.failure() != zmq.EVENT_DISCONNECTED:
            pass

    def join(self, device_id, state_id=b"s" * 16, incarnation=1, session=None):
        """Say hello; return the answer."""
        self.say(Hello(device_id, state_id, incarnation, session))
        return self.hear()

    def close(self):
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


@contextlib.contextmanager
def client(address, *arguments, **options):
    """Yield a client, and close it."""
    one = Client(address, *arguments, **options)
    try:
        yield one
    finally:
        one.close()


def enrolled(keys, name="pi-1"):
    """Return a key pair that is in the hub's list."""
    pair = KeyPair.make()
    keys.allow(name, "device", pair.public)
    return pair


def start_hub(commands, keys, *flags, under=(), **settings):
    """Start a hub with keys; return the process and its address."""
    return commands.hub(commands.settings(**settings), "--keys", keys.folder, *flags, under=under)


def ask(address, keys):
    """Return the hub's status as an operator sees it."""
    return fetch_status(address, PATIENCE_S, keys.folder)


def denied(address, keys, name, count=1):
    """Wait until the hub has counted that many under a name; return all counts."""

    def look():
        counts = ask(address, keys)["denied"]
        return counts if counts.get(name, 0) >= count else None

    return until(look, f"{name} denied")


def is_welcome(message):
    return isinstance(message, Welcome)


def begin_push(device, welcome, *, pieces):
    """Push an update of a member, or the first of its pieces."""
    device.say(Fetch(welcome.session))
    version, payload = device.hear().version, bytes(welcome.spec.nbytes)
    push = Push(
        welcome.session, 1, version, 1, 8, 1.0, 0.1, 0.1, "identity", wire.checksum(payload), len(payload),
        transfer=int(pieces),
    )  # fmt: skip
    device.say(push, *([] if pieces else [payload]))
    if pieces:
        assert device.hear() == Credit(1, 0)
        device.say(Piece(1, 0, wire.checksum(payload[:8])), payload[:8])


class Proxy:
    """A TCP proxy that keeps what goes to the hub, and counts what comes from it.

    It cuts the first connections, each after this number of bytes from the hub, and no others.
    """

    def __init__(self, port, *after_bytes):
        self.recorded, self.cut, self.down_bytes = bytearray(), 0, 0
        self._port, self._after_bytes = port, [*after_bytes]
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._open, self._threads = [self._server], []
        self._start(self._accept)

    def _start(self, *target):
        self._threads.append(threading.Thread(target=target[0], args=target[1:]))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                device, _ = self._server.accept()
                hub = socket.create_connection(("127.0.0.1", self._port))
                self._open += [device, hub]
                left_bytes = self._after_bytes.pop(0) if self._after_bytes else 1 << 40
                self._start(self._pump, device, hub, 1 << 40, self.recorded.extend)
                self._start(self._pump, hub, device, left_bytes, self._count)

    def _count(self, data):
        self.down_bytes += len(data)

    def _pump(self, source, target, left_bytes, note):
        with contextlib.suppress(OSError):
            while data := source.recv(min(4096, left_bytes)):
                note(data)
                target.sendall(data)
                left_bytes -= len(data)
            self.cut += not left_bytes
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._open:
            each.close()
