"""CURVE on sockets: libzmq's encryption, by which both ends prove their keys."""

import asyncio

import zmq

from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair
from edgeasync.errors import AddressError
from edgeasync.net.address import host_of

FRAME_BYTES = 33
"""What CURVE adds to a frame. libzmq holds its limit against the frame as it travels."""

DOMAIN = b"edgeasync"
"""The ZAP domain of a hub's socket: without one libzmq would let everybody in."""

PROBE_S = 3.0
"""How long a hub may take to say how it speaks."""

CUTS_MIN = 3
"""Handshakes in a row that a hub of another key must cut before it is taken for one.

A single one says nothing: links break, and a hub that shuts a key out cuts those who have said nothing yet.
"""

_HELLO = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"
"""The beginning of a greeting of ZMTP 3, as much as the other side needs to send the whole of its own."""


def serve_keys(socket: "zmq.Socket[bytes]", pair: KeyPair) -> None:
    """Let a socket that is not bound yet take CURVE connections alone, of keys that the ZAP handler lets in."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def refuse_old_peers(socket: "zmq.Socket[bytes]") -> None:
    """Let a socket without keys, which is not bound yet, speak ZMTP 3 alone.

    Older peers send no mechanism, so libzmq refuses them where it would ask a ZAP handler. There must be no
    handler in the socket's context: then libzmq asks nobody, and lets all others in.
    """
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)


def use_keys(socket: "zmq.Socket[bytes]", pair: KeyPair, hub: Key) -> None:
    """Let a socket that is not connected yet speak under a key, and with the hub of that key alone."""
    socket.set(zmq.CURVE_SERVERKEY, hub)
    socket.set(zmq.CURVE_PUBLICKEY, pair.public)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)


async def mechanism_at(address: str) -> str:
    """Return how an address secures connections: `CURVE`, `NULL`, or nothing if it is not ZeroMQ."""
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
