"""Asking a live hub how it does."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq

from edgeasync.durable.keys import operator_keys
from edgeasync.errors import AccessError, AddressError, HubUnreachableError, ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSIONS, Status, StatusRequest
from edgeasync.runtime.address import check_connect
from edgeasync.runtime.curve import mechanism_at, use_keys


def fetch_status(address: str, timeout_s: float = 3.0, keys: Path | None = None) -> dict[str, Any]:
    """Return the status object of the hub at `address` (docs/wire.md); blocks up to `timeout_s`.

    A hub with keys answers an operator, whose folder of keys `keys` is. Raises `AddressError`, `AccessError` if
    the keys do not fit, `HubUnreachableError` if nobody answers in time, `StorageError`, or `ProtocolError`.
    """
    pair = None if keys is None else operator_keys(keys)
    check_connect(address, insecure=True)  # a status tells nothing that is worth a device's trust
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, "[" in address)
    if pair is not None:
        use_keys(socket, *pair)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    try:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise AddressError(
                f"{address!r} is not an address: {error.strerror}; write tcp://HOST:PORT"
            ) from error
        socket.send(wire.encode(StatusRequest(), PROTOCOL_VERSIONS[0]))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        ready = dict(poller.poll(round(timeout_s * 1000)))
        if socket not in ready:
            _check_keys(address, denied=monitor in ready, keyed=pair is not None)
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
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        context.term()


def _check_keys(address: str, *, denied: bool, keyed: bool) -> None:
    """Raise `AccessError` if it is the keys why nobody answers."""
    if denied:
        raise AccessError(f"{address}: this hub does not know this operator key; give its own folder as --keys")
    mechanism = asyncio.run(mechanism_at(address))
    if keyed and mechanism == "CURVE":
        raise AccessError(f"{address}: this hub has another key than the folder of keys says")
    if keyed and mechanism == "NULL":
        raise AccessError(f"{address}: this hub has no keys; leave out --keys")
    if not keyed and mechanism == "CURVE":
        raise AccessError(f"{address}: this hub answers operators alone; give --keys, the folder of its keys")


def _read(frames: list[bytes]) -> dict[str, Any]:
    if len(frames) != 2 or not isinstance(wire.decode(frames[0]), Status):
        raise ProtocolError("no status")
    status = msgspec.json.decode(frames[1], type=dict[str, Any])
    if missing := {"lineage", "version", "devices"} - set(status):
        raise ProtocolError(f"a status without {min(missing)}")
    return status
