"""The flooders: strangers and one enrolled key, each a process on half a core at most."""

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from benchmarks.hub_process import allow_many_files, make_spec
from edgeasync.durable.keys import KeyPair
from edgeasync.net.curve import use_keys
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Push, StatusRequest, Welcome
from tests.support.security import zmtp

LENGTH = 250_000
"""A model of 1 MB."""

SHARE = 0.5
"""Share of a core that a flooder uses."""

SOURCE = "127.0.0.2"
"""Address of strangers."""

CONNECTIONS = 1_000
HELLOS_PER_S = 10_000
MEMBERS = 64
EMPTY_FRAMES = 30_000
NAME = "flood"


@dataclass(frozen=True)
class Target:
    """The hub, and the enrolled key."""

    address: str
    hub_key: bytes
    secret: bytes

    @property
    def pair(self) -> KeyPair:
        """The enrolled key pair."""
        return KeyPair.of(self.secret)


class Throttle:
    """Limits this process to its share of a core."""

    def __init__(self) -> None:
        self._wall_s, self._used_s = time.monotonic(), time.process_time()

    def pause(self) -> None:
        """Sleep until the share is respected."""
        used_s, wall_s = time.process_time() - self._used_s, time.monotonic() - self._wall_s
        if used_s > SHARE * wall_s:
            time.sleep(used_s / SHARE - wall_s)
        if wall_s > 1.0:
            self.__init__()  # type: ignore[misc]


Flood = Callable[[Target], Iterator[None]]


def connections(target: Target) -> Iterator[None]:
    """Hold a thousand silent connections open."""
    yield from _hold(target, lambda _connection, _step: None)


def slow_handshakes(target: Target) -> Iterator[None]:
    """Hold a thousand connections that send their greeting byte by byte."""
    greeting = zmtp.greeting(b"CURVE")

    def dribble(connection: socket.socket, step: int) -> None:
        if step < 60:
            connection.send(greeting[step : step + 1])

    yield from _hold(target, dribble)


def half_open(target: Target) -> Iterator[None]:
    """Hold a thousand connections that stop in mid-handshake, after the hub has computed."""
    begun = zmtp.greeting(b"CURVE") + zmtp.hello_of(target.hub_key)

    def begin(connection: socket.socket, step: int) -> None:
        if step == 0:
            connection.send(begun)

    yield from _hold(target, begin)


def _hold(target: Target, say: Callable[[socket.socket, int], None]) -> Iterator[None]:
    """Keep a thousand connections open, and replace each one that the hub closes."""
    held: list[tuple[socket.socket, int]] = []
    while True:
        while len(held) < CONNECTIONS:
            with contextlib.suppress(OSError):
                connection = zmtp.tcp(target.address, SOURCE)
                connection.setblocking(False)
                held.append((connection, 0))
            yield
        kept = []
        for connection, step in held:
            try:
                say(connection, step)
                alive = connection.recv(4096) != b""
            except BlockingIOError:
                alive = True
            except OSError:
                alive = False
            if alive:
                kept.append((connection, step + 1))
            else:
                connection.close()
            yield
        held = kept


def unknown_keys(target: Target) -> Iterator[None]:
    """Repeat full handshakes under a key that the hub does not know."""
    pair = KeyPair.make()
    while True:
        with contextlib.suppress(OSError, AssertionError):
            zmtp.Peer(target.address, pair, target.hub_key, SOURCE).close()
        yield


def own_connections(target: Target) -> Iterator[None]:
    """Hold a thousand connections under one key; each sends `Hello`."""
    held: list[zmtp.Peer] = []
    numbers = itertools.cycle(range(1000))
    while True:
        with contextlib.suppress(OSError, AssertionError):
            peer = zmtp.Peer(target.address, target.pair, target.hub_key)
            peer.tcp.sendall(peer.frame(_hello(next(numbers))))
            peer.tcp.setblocking(False)
            held.append(peer)
        yield
        if len(held) >= CONNECTIONS:
            held.pop(0).close()


def hellos(target: Target) -> Iterator[None]:
    """Send `Hello` ten thousand times a second, under the thousand device ids of a key."""
    with _dealer(target) as dealer:
        began_s = time.monotonic()
        for number in itertools.count():
            with contextlib.suppress(zmq.Again):
                dealer.send(_hello(number % 1000), zmq.NOBLOCK)
            _drain(dealer)
            while number > HELLOS_PER_S * (time.monotonic() - began_s):
                time.sleep(0.001)
            yield


def endless(target: Target) -> Iterator[None]:
    """Send a message that never ends."""
    while True:
        with contextlib.suppress(OSError, AssertionError):
            peer = zmtp.Peer(target.address, target.pair, target.hub_key)
            peer.tcp.settimeout(1.0)
            while True:
                peer.tcp.sendall(peer.frame(bytes(1 << 16), more=True))
                yield
        yield


def empty_frames(target: Target) -> Iterator[None]:
    """Send messages of many empty frames, just under the size limit."""
    with _dealer(target) as dealer:
        while True:
            with contextlib.suppress(zmq.Again):
                for number in range(EMPTY_FRAMES):
                    dealer.send(b"", zmq.NOBLOCK | (zmq.SNDMORE if number < EMPTY_FRAMES - 1 else 0))
            _drain(dealer)
            yield


def headers(target: Target) -> Iterator[None]:
    """Send headers of 1 MiB."""
    header = bytes(1 << 20)
    with _dealer(target) as dealer:
        while True:
            with contextlib.suppress(zmq.Again):
                dealer.send(header, zmq.NOBLOCK)
            _drain(dealer)
            yield


def status(target: Target) -> Iterator[None]:
    """Request the status as fast as possible without reading any answer."""
    request = wire.encode(StatusRequest())
    with _dealer(target, read_max=1) as dealer:
        while True:
            with contextlib.suppress(zmq.Again):
                dealer.send(request, zmq.NOBLOCK)
            yield


def slots(target: Target) -> Iterator[None]:
    """Reserve room for updates with 64 members of one key, which never send the updates."""
    with contextlib.ExitStack() as stack:
        dealers = [stack.enter_context(_dealer(target)) for _ in range(MEMBERS)]
        sessions: dict[int, bytes] = {}
        for turn in itertools.count():
            place = turn % MEMBERS
            dealer = dealers[place]
            with contextlib.suppress(zmq.Again):
                while True:
                    answer = wire.decode(dealer.recv_multipart(zmq.NOBLOCK)[0])
                    if isinstance(answer, Welcome):
                        sessions[place] = answer.session
            with contextlib.suppress(zmq.Again):
                if place in sessions:
                    dealer.send(_announcement(sessions[place], turn), zmq.NOBLOCK)
                    dealer.send(wire.encode(Fetch(sessions[place])), zmq.NOBLOCK)
                else:
                    dealer.send(_hello(place), zmq.NOBLOCK)
            time.sleep(0.01)
            yield


def _announcement(session: bytes, number: int) -> bytes:
    nbytes = make_spec(LENGTH).nbytes
    push = Push(session, 1, ModelVersion("0" * 16, 0), 1, 1, 0.0, 0.0, 0.1, "identity", 1, nbytes)
    return wire.encode(msgspec.structs.replace(push, transfer=number + 1))


def _hello(number: int) -> bytes:
    return wire.encode(Hello(f"{NAME}/{number}", number.to_bytes(16, "big"), 1))


@contextlib.contextmanager
def _dealer(target: Target, read_max: int = 1000) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RCVHWM, read_max)
    use_keys(dealer, target.pair, target.hub_key)
    dealer.connect(target.address)
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


def _drain(dealer: "zmq.Socket[bytes]") -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            dealer.recv(zmq.NOBLOCK)


STRANGERS: dict[str, Flood] = {
    "1,000 connections": connections,
    "slow handshakes": slow_handshakes,
    "half-open handshakes": half_open,
    "unknown keys": unknown_keys,
}
ENROLLED: dict[str, Flood] = {
    "1,000 connections of a key": own_connections,
    "10,000 hellos/s": hellos,
    "endless frames": endless,
    "empty frames": empty_frames,
    "1 MiB headers": headers,
    "status": status,
    "64 members hold places": slots,
}
FLOODS = STRANGERS | ENROLLED


def run_flood(name: str, target: Target, pipe: "Connection[Any, Any]") -> None:
    """Flood until killed."""
    allow_many_files()
    throttle = Throttle()
    pipe.send(None)
    for _ in FLOODS[name](target):
        throttle.pause()
