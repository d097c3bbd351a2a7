"""Asking a live hub how it does."""

from typing import Any

import msgspec
import zmq

from edgeasync.errors import AddressError, HubUnreachableError, ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Status, StatusRequest


def fetch_status(address: str, timeout_s: float = 3.0) -> dict[str, Any]:
    """Return the status object of the hub at `address` (docs/wire.md); blocks up to `timeout_s`.

    Raises `AddressError`, `HubUnreachableError` if nobody answers in time, or `ProtocolError`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, "[" in address)
    try:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise AddressError(
                f"{address!r} is not an address: {error.strerror}; write tcp://HOST:PORT"
            ) from error
        socket.send(wire.encode(StatusRequest()))
        if not socket.poll(round(timeout_s * 1000)):
            raise HubUnreachableError(
                f"no hub answers at {address} within {timeout_s:g} s; start one with 'edgeasync hub', "
                "or check the address and the network"
            )
        frames = socket.recv_multipart()
        if len(frames) != 2 or not isinstance(wire.decode(frames[0]), Status):
            raise ProtocolError(f"what answers at {address} is not an edgeasync hub of this version")
        return msgspec.json.decode(frames[1], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the hub at {address} sent a status that cannot be read: {error}") from error
    finally:
        socket.close(0)
        context.term()
