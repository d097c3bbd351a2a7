"""Routing ids of a ROUTER: how a claimed one is kept from ending the process, and how it is told apart.

A peer may name its routing id in the handshake. libzmq names the others by a counter: a zero byte and 32 bits. If
a peer has claimed the one that the counter comes to, libzmq aborts the process. No option refuses claims. But the
counter begins with numbers of libc's `rand`, which nobody has seeded, so that it is always the same. Seeded with a
random number, the counter cannot be known, and no peer is ever told its own id.

The hub knows where the counter began. So it knows which ids libzmq can have given: all others were claimed.
"""

import ctypes
import secrets

import zmq

_PROBE = "inproc://first-routing-id"
_COUNTS = 1 << 32


def seed() -> None:
    """Seed libc's `rand`; to be called right before a ROUTER is made."""
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


class RoutingIds:
    """The ids that libzmq has given for a ROUTER, which nobody else can reach yet; `count` are its connections."""

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        self.count = 0
        self._first = _first_of(router)

    def has_given(self, routing_id: bytes) -> bool:
        """Whether libzmq can have given this id."""
        if len(routing_id) != 5 or routing_id[0]:
            return False
        return (int.from_bytes(routing_id[1:], "big") - self._first) % _COUNTS <= self.count


def _first_of(router: "zmq.Socket[bytes]") -> int:
    """Return the number that a ROUTER's counter begins with."""
    address = f"{_PROBE}-{id(router)}"
    router.bind(address)
    with router.context.socket(zmq.DEALER) as probe:
        probe.set(zmq.LINGER, 0)
        probe.connect(address)
        probe.send(b"")
        routing_id, _ = router.recv_multipart()
    router.unbind(address)
    return int.from_bytes(routing_id[1:], "big")
