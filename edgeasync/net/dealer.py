"""Create sockets that connect to one hub or peer."""

import zmq

from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair
from edgeasync.errors import AddressError
from edgeasync.net.curve import use_keys

Pair = tuple[KeyPair, Key]
"""The key pair of this side, and the public key of the other side."""


def make_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", frame_bytes_max: int, pair: Pair | None, *, ipv6: bool
) -> "zmq.Socket[bytes]":
    """Return an unconnected DEALER socket that accepts frames of up to `frame_bytes_max` bytes.

    Set `ipv6` if the address to connect to is an IPv6 address (`is_ipv6`).
    """
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IPV6, ipv6)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, frame_bytes_max)
    if pair is not None:
        use_keys(socket, *pair)
    return socket


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connect a socket; raises `AddressError`."""
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise AddressError(f"cannot connect to {address!r} ({error.strerror}); use tcp://HOST:PORT") from error
