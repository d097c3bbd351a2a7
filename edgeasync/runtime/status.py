"""Asking a live hub how it does."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from edgeasync.durable.keys import operator_keys
from edgeasync.errors import AccessError, AddressError, HubUnreachableError, ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSIONS, Status, StatusRequest, Wake
from edgeasync.runtime.address import check_connect
from edgeasync.runtime.curve import mechanism_at, use_keys

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def fetch_status(
    address: str, timeout_s: float = 3.0, keys: Path | None = None, *, wake: bool = False
) -> dict[str, Any]:
    """Return the status object of the hub at `address`; blocks for up to `timeout_s`. With `wake`, wake its fleet.

    The page "Events and JSON" describes its keys. To ask a hub with keys, give an operator's folder as `keys`.
    Raises `AddressError`, `AccessError` if the keys do not fit, `HubUnreachableError` if no answer comes in
    time, `StorageError`, or `ProtocolError`.
    """
    pair = None if keys is None else operator_keys(keys)
    check_connect(address, insecure=True)  # a status tells nothing that is worth a device's trust
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, "[" in address)
    if pair is not None:
        use_keys(socket, *pair)
    monitor = socket.get_monitor_socket(_HANDSHAKE_FAILED)
    try:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise AddressError(
                f"{address!r} is not an address: {error.strerror}; write tcp://HOST:PORT"
            ) from error
        socket.send(wire.encode(Wake() if wake else StatusRequest(), PROTOCOL_VERSIONS[0]))
        if not _answered(
            socket, monitor, timeout_s, lambda denied: _check_keys(address, denied, pair is not None)
        ):
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


def _answered(
    socket: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    timeout_s: float,
    check: Callable[[bool], None],
) -> bool:
    """Wait for an answer; `check` raises if it is the keys why a handshake failed, or was denied."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    until_s, checked = time.monotonic() + timeout_s, False
    while (left_s := until_s - time.monotonic()) > 0:
        ready = dict(poller.poll(math.ceil(left_s * 1000)))
        if socket in ready:
            return True
        if monitor in ready:
            denied = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            if denied or not checked:
                check(denied)
                checked = True
    if not checked:
        check(False)
    return False


def _check_keys(address: str, denied: bool, keyed: bool) -> None:  # noqa: FBT001
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
