"""Asking a live hub how it does."""

from typing import Any

import msgspec
import zmq

from edgeasync.errors import AddressError, HubUnreachableError, ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSIONS, Status, StatusRequest
from edgeasync.runtime.address import check_connect


def fetch_status(address: str, timeout_s: float = 3.0) -> dict[str, Any]:
    """Return the status object of the hub at `address` (docs/wire.md); blocks up to `timeout_s`.

    Raises `AddressError`, `HubUnreachableError` if nobody answers in time, or `ProtocolError`.
    """
    check_connect(address, insecure=True)  # a status tells nothing that is worth a device's trust
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
        socket.send(wire.encode(StatusRequest(), PROTOCOL_VERSIONS[0]))
        if not socket.poll(round(timeout_s * 1000)):
            raise HubUnreachableError(
                f"no hub answers at {address} within {timeout_s:g} s; start one with 'edgeasync hub', "
                "or check the address and the network"
            )
        return _read(socket.recv_multipart())
    except (ProtocolError, msgspec.DecodeError) as error:
        raise ProtocolError(
            f"what answers at {address} is not an edgeasync hub of this version ({error}); check the address"
        ) from error
    finally:
        socket.close(0)
        context.term()


def _read(frames: list[bytes]) -> dict[str, Any]:
    if len(frames) != 2 or not isinstance(wire.decode(frames[0]), Status):
        raise ProtocolError("no status")
    status = msgspec.json.decode(frames[1], type=dict[str, Any])
    if missing := {"lineage", "version", "devices"} - set(status):
        raise ProtocolError(f"a status without {min(missing)}")
    return status
