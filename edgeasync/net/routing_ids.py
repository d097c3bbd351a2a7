"""Protect a ROUTER from routing ids that peers choose, and detect them.

A peer may choose its routing id in the handshake. libzmq numbers the others by a counter: a zero
byte and 32 bits. If a peer has already chosen the id that the counter reaches, libzmq aborts the
process. No option forbids chosen ids. By default the counter always starts at the same number, from
libc's unseeded `rand`. With a random seed, no peer can guess the counter, and no peer learns its
own id.

The hub knows where the counter started. So it knows which ids libzmq may have assigned; peers have
chosen all others.
"""

import ctypes
import secrets

import zmq

_PROBE = "inproc://first-routing-id"
_COUNTS = 1 << 32


def seed() -> None:
    """Seed libc's `rand`. Call it right before a ROUTER is created."""
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


class RoutingIds:
    """The ids that libzmq has assigned for a ROUTER; `count` is the number of its connections.

    Create it before anybody else can connect.
    """

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        self.count = 0
        self._first = _first_of(router)

    def has_given(self, routing_id: bytes) -> bool:
        """Return whether libzmq may have assigned this id."""
        if len(routing_id) != 5 or routing_id[0]:
            return False
        return (int.from_bytes(routing_id[1:], "big") - self._first) % _COUNTS <= self.count


def _first_of(router: "zmq.Socket[bytes]") -> int:
    """Return the number at which a ROUTER's counter starts."""
    address = f"{_PROBE}-{id(router)}"
    router.bind(address)
    with router.context.socket(zmq.DEALER) as probe:
        probe.set(zmq.LINGER, 0)
        probe.connect(address)
        probe.send(b"")
        routing_id, _ = router.recv_multipart()
    router.unbind(address)
    return int.from_bytes(routing_id[1:], "big")
