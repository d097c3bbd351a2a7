"""CURVE on sockets: libzmq's encryption, in which both ends prove that they own their keys."""

import asyncio

import zmq

from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair
from edgeasync.errors import AddressError
from edgeasync.net.address import host_of

FRAME_BYTES = 33
"""Number of bytes that CURVE adds to a frame. libzmq's frame limit applies to the encrypted frame."""

DOMAIN = b"edgeasync"
"""The ZAP domain of a hub's socket. Without a domain, libzmq would admit all peers."""

PROBE_S = 3.0
"""Timeout for a hub's answer to a ZMTP greeting."""

CUTS_MIN = 3
"""Number of consecutive aborted handshakes after which the hub's key is assumed to have changed.

A smaller number may have other causes, such as a broken link, or a hub that closes connections
during the handshake because a key was revoked.
"""

_HELLO = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"
"""The first bytes of a ZMTP 3 greeting.

They are enough for the other side to send its own greeting.
"""


def serve_keys(socket: "zmq.Socket[bytes]", pair: KeyPair) -> None:
    """Require CURVE on a socket that is not bound yet. The ZAP handler authorizes the keys."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def refuse_old_peers(socket: "zmq.Socket[bytes]") -> None:
    """Require ZMTP 3 on a socket without keys that is not bound yet.

    Older peers send no security mechanism, so libzmq refuses them if the socket has a ZAP domain.
    The context of the socket must not have a ZAP handler. Without a handler, libzmq admits all
    other peers without authorization.
    """
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)


def use_keys(socket: "zmq.Socket[bytes]", pair: KeyPair, hub: Key) -> None:
    """Set the key pair and the hub's key on a socket that is not connected yet."""
    socket.set(zmq.CURVE_SERVERKEY, hub)
    socket.set(zmq.CURVE_PUBLICKEY, pair.public)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)


async def mechanism_at(address: str) -> str:
    """Return the security mechanism at an address: `CURVE`, `NULL`, or empty if it is not ZeroMQ."""
    try:
        host = host_of(address)
        async with asyncio.timeout(PROBE_S):
            if host is not None:
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(address.rpartition(":")[2]))
            elif address.startswith("ipc://"):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("ipc://"))
            else:
                return ""
            try:
                writer.write(_HELLO)
                greeting = await reader.readexactly(32)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, AddressError):
        return ""
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace") if greeting[0] == 0xFF else ""
