"""Asking a live hub how it does."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from edgeasync.config import expanded
from edgeasync.durable.keys import operator_keys
from edgeasync.errors import AccessError, ConfigError, HubUnreachableError, ProtocolError
from edgeasync.net.address import check_connect, is_ipv6
from edgeasync.net.curve import mechanism_at
from edgeasync.net.dealer import Pair, connect, make_dealer
from edgeasync.net.reach import KeyMismatch, key_mismatch
from edgeasync.net.socket_monitor import DENIED
from edgeasync.protocol import wire
from edgeasync.protocol.messages import DEVICE_ID_PATTERN, Order, Refuse, Request, Status, StatusRequest, Wake
from edgeasync.structs import parse_json

AGAIN_S = 0.1
"""How long after a connection that broke the hub is asked again."""

STATUS_BYTES_MAX = 1 << 26
"""The longest status that is read: one of ten thousand devices has some 10 MB."""

_ENDINGS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)

_MISMATCHES: dict[KeyMismatch, str] = {
    "unknown": "this hub does not know this operator key; give its own folder as keys (--keys)",
    "another hub": "this hub has another key than the folder of keys says; give the folder of that hub's "
    "keys (--keys), or correct the address",
    "no keys there": "this hub has no keys; leave out keys (--keys)",
    "no keys here": "this hub answers operators alone; give keys (--keys), the folder of its keys",
}

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_Ending = Literal["answered", "denied", "cut", "lost", "late"]
"""What became of a connection; `cut` is in the handshake, `lost` after it or for a time."""


def fetch_status(
    address: str, timeout_s: float = 3.0, keys: Path | None = None, *, wake: bool = False
) -> dict[str, Any]:
    """Return the status object of the hub at `address`; blocks for up to `timeout_s`. With `wake`, wake its fleet.

    The page "Events and JSON" describes its keys. To ask a hub with keys, give an operator's folder as `keys`.
    Raises `AddressError`, `AccessError` if the keys do not fit, `HubUnreachableError` if no answer comes in
    time, `StorageError`, or `ProtocolError`.

    >>> import tempfile
    >>> from edgeasync import Hub, fetch_status
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> with Hub(SoftmaxModel(inputs=3, classes=2), run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*") as hub:
    ...     fetch_status(hub.address)["version"]
    0
    """
    pair = None if keys is None else operator_keys(expanded(keys))
    return ask(address, timeout_s, pair, Wake() if wake else StatusRequest())


def give_order(
    address: str,
    device_id: str,
    order: Literal["quarantine", "release"],
    timeout_s: float = 3.0,
    keys: Path | None = None,
) -> dict[str, Any]:
    """Exclude a device of the hub at `address` and all others with its key, or release them; return the status.

    What an excluded device sends does not count, over restarts of hub and device, until it is released. The order
    is in the hub's journal when this returns; without a journal the next checkpoint has it.

    Raises what `fetch_status` raises, and `ConfigError` if the hub knows no such device.
    """
    if not re.match(DEVICE_ID_PATTERN, device_id):
        raise ConfigError(f"{device_id!r} is not a device's name; 'edgeasync status' lists those of the hub")
    pair = None if keys is None else operator_keys(expanded(keys))
    return ask(address, timeout_s, pair, Order(device_id, order))


def ask(address: str, timeout_s: float, pair: Pair | None, question: Request) -> dict[str, Any]:
    """Return the status that the hub at `address` answers the holder of a key: `pair` is its own, and the hub's.

    Raises what `fetch_status` raises, and `ConfigError` if the hub refuses.
    """
    check_connect(address, insecure=True)  # a status tells nothing that is worth a device's trust
    context: Context = zmq.Context()
    until_s, cuts = time.monotonic() + timeout_s, 0
    try:
        while True:
            frames, ending = _ask(context, address, pair, until_s, question)
            if frames is not None:
                return _read(frames)
            cuts += ending == "cut"
            if ending != "lost":
                _check_keys(address, ending, cuts, keyed=pair is not None)
            if ending == "late":
                raise HubUnreachableError(
                    f"no hub answers at {address} within {timeout_s:g} s; start one with 'edgeasync hub', "
                    "check the address and the network, or wait longer (--timeout-s)"
                )
            time.sleep(AGAIN_S)
    except (ProtocolError, ValueError) as error:
        raise ProtocolError(
            f"what answers at {address} is not an edgeasync hub of this version ({error}); check the address"
        ) from error
    finally:
        context.term()


def is_denied(address: str, pair: Pair, timeout_s: float) -> bool:
    """Return whether a hub refuses these keys; nothing is sent to it."""
    with zmq.Context() as context, _asking(context, address, pair, zmq.EVENT_HANDSHAKE_SUCCEEDED) as (_, monitor):
        return bool(monitor.poll(math.ceil(1000 * timeout_s))) and _ending(monitor) == "denied"


def _ask(
    context: Context,
    address: str,
    pair: Pair | None,
    until_s: float,
    question: Request,
) -> tuple[list[bytes] | None, _Ending]:
    """Ask over a connection of its own; return the answer, if there is one, and else what became of it."""
    with _asking(context, address, pair) as (socket, monitor):
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.send(wire.encode(question))
        ready = dict(poller.poll(math.ceil(max(0.0, until_s - time.monotonic()) * 1000)))
        if socket in ready:
            return socket.recv_multipart(), "answered"
        return None, _ending(monitor) if monitor in ready else "late"


@contextlib.contextmanager
def _asking(context: Context, address: str, pair: Pair | None, events: int = 0) -> Iterator[tuple[Socket, Socket]]:
    """Yield a socket that connects to a hub, and the monitor of how that ends, and of other `events`."""
    socket = make_dealer(context, STATUS_BYTES_MAX, pair, ipv6=is_ipv6(address))
    monitor = socket.get_monitor_socket(_ENDINGS | events)
    try:
        connect(socket, address)
        yield socket, monitor
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


def _ending(monitor: Socket) -> _Ending:
    """Return what an event says of the connection; after it what was asked is lost."""
    message = recv_monitor_message(monitor)
    match message["event"]:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "denied" if message["value"] == DENIED else "lost"
        case zmq.EVENT_DISCONNECTED:
            return "lost"
        case _:
            return "cut"


def _check_keys(address: str, ending: _Ending, cuts: int, *, keyed: bool) -> None:
    """Raise `AccessError` if it is the keys why nobody answers; `cuts` handshakes were cut."""
    denied = ending == "denied"
    mechanism = "" if denied else asyncio.run(mechanism_at(address))
    if (mismatch := key_mismatch(denied=denied, keyed=keyed, mechanism=mechanism, cuts=cuts)) is not None:
        raise AccessError(f"{address}: {_MISMATCHES[mismatch]}")


def _read(frames: list[bytes]) -> dict[str, Any]:
    if len(frames) == 1 and isinstance(refuse := wire.decode(frames[0]), Refuse):
        raise ConfigError(f"the hub refuses: {refuse.sentence}")
    if len(frames) != 2 or not isinstance(wire.decode(frames[0]), Status):
        raise ProtocolError("no status")
    status = parse_json(frames[1], dict[str, Any])
    if missing := {"lineage", "version", "devices"} - set(status):
        raise ProtocolError(f"a status without {min(missing)}")
    return status
