"""Detect routing ids that peers have chosen, and protect a ROUTER from them.

A peer may choose its routing id in the handshake. libzmq assigns ids to the other peers with a
counter: a zero byte and 32 bits. If the counter reaches an id that a peer has already chosen,
libzmq aborts the process. No option forbids chosen ids. By default the counter always starts at the
same number, which it takes from libc's unseeded `rand`. With a random seed, no peer can guess the
counter. Peers do not learn the ids that libzmq has assigned to them.

The hub knows the number at which the counter started. So it knows which ids libzmq may have
assigned. All other ids were chosen by peers.
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
    """The routing ids that libzmq has assigned for a ROUTER.

    `count` is the number of connections to the ROUTER so far. Create the object before any peer can
    connect.
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
